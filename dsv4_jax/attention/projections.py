"""The projections of every attention type, and its output projection.

Source: deepseek_v4.md section 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.compressor import weights_and_biases
from dsv4_jax.attention.indexer import split_index_heads
from dsv4_jax.attention.params import AttentionParams, IndexerParams, SourceParams
from dsv4_jax.attention.pooling import repool
from dsv4_jax.cache.new_tokens import Projections
from dsv4_jax.collectives import sum_to_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.linear import (
    grouped_linear,
    linear_in_parts,
    linears,
    linears_beside_dense,
    name_product,
)
from dsv4_jax.mesh import MODEL, axis_size
from pallas_kernels import joined_linears
from pallas_kernels.common.norm_rope import rms_norm_by_pairs, rotate
from pallas_kernels.common.pending import MaybeSplit, Unnormed, finish
from pallas_kernels.common.weights import (
    BlockFP8,
    Weight,
    decode_weight,
    is_quantized,
    with_activations,
)


def project_input(
    params: AttentionParams, x: jax.Array, config: DSV4Config
) -> tuple[jax.Array, jax.Array]:
    """What every attention makes of its input [..., D].

    Returns:
      The normed query latent [..., ql], from which the indexer's queries start too, and the window
      entry before norm and RoPE, [..., C], key and value in one.
    """
    latent, kv = linears(
        x, [params.wq_a, params.wkv], norms=[params.q_norm, None], eps=config.rms_norm_eps
    )
    return checkpoint_name(latent, "q_lora"), checkpoint_name(kv, "kv_lin")


class ProjectedTokens(NamedTuple):
    """What a cached layer makes of its input.

    Attributes:
      latent: [T, ql], the query latent; its norm may be left to who reads it.
      kv: [T, C], the window entry before norm and RoPE.
      compressor: of CSA and HCA layers that make entries; scores of one-token entries are their
        values, which nobody reads.
      indexer: of the compressor of index keys, on CSA layers that have one.
      index_weights: f32[T, IH], of index heads, where they select.
    """

    latent: jax.Array | Unnormed
    kv: jax.Array
    compressor: Projections | None = None
    indexer: Projections | None = None
    index_weights: jax.Array | None = None


def project_tokens(
    params: AttentionParams,
    x: jax.Array,
    positions: jax.Array,
    config: DSV4Config,
    *,
    selects: bool = False,
) -> ProjectedTokens:
    """`project_input` and what compressors and index heads read: one launch for one or two tokens.

    Args:
      params: parameters of the layer.
      x: [T, D], normed.
      positions: i32[T].
      config: the model.
      selects: whether the indexer's heads are to select.
    """
    indexer = params.indexer
    compressors = [] if params.compressor is None else [params.compressor]
    if indexer is not None and indexer.compressor is not None:
        compressors.append(indexer.compressor)
    dense, biases = weights_and_biases(compressors)
    source = params.source
    if source is not None:
        dense = _source_weights(source)
        biases = [None] * len(dense)
    if selects:
        assert indexer is not None
        dense, biases = [*dense, indexer.weights_proj], [*biases, None]
    [latent, kv], products = linears_beside_dense(
        x,
        [params.wq_a, params.wkv],
        dense,
        biases,
        positions,
        norms=[params.q_norm, None],
        eps=config.rms_norm_eps,
    )
    last = products.pop() if selects else None
    if source is not None:
        new = Projections(values=products[0], scores=products[-1])
        return ProjectedTokens(latent, finish(kv), compressor=new, index_weights=last)
    pairs = zip(products[::2], products[1::2], strict=True)
    new = [
        repool(
            config.idea.pooling, compressor, Projections(values=values, scores=scores), positions
        )
        for compressor, (values, scores) in zip(compressors, pairs, strict=True)
    ]
    projections = dict(zip(("compressor", "indexer"), new, strict=False))
    return ProjectedTokens(latent, finish(kv), index_weights=last, **projections)


def project_source(source: SourceParams, x: jax.Array, positions: jax.Array) -> Projections:
    """What entries are made of alone, as `project_tokens` has it, of a layer that makes some."""
    dense = _source_weights(source)
    products = joined_linears(x, dense, [None] * len(dense), positions)
    return Projections(values=products[0], scores=products[-1])


def _source_weights(source: SourceParams) -> list[jax.Array]:
    return [source.wkv] if source.wgate is None else [source.wkv, source.wgate]


def project_entries(
    layers: Sequence[AttentionParams], x: jax.Array, positions: jax.Array
) -> list[jax.Array]:
    """The window entries alone of layers that read the same x [T, D], as `project_tokens` has them.

    Returns:
      [T, C] of each layer, before norm and RoPE.
    """
    weights = [layer.wkv for layer in layers]
    products, _ = linears_beside_dense(
        x, weights, [], [], positions, norms=[None] * len(weights), eps=0.0
    )
    return [finish(product) for product in products]


def project_queries(
    params: AttentionParams,
    latent: jax.Array | Unnormed,
    config: DSV4Config,
    indexer: IndexerParams | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The queries before norm and RoPE: [..., ql] -> [..., H, C], on a mesh of its own heads.

    With an indexer also its queries before RoPE, [..., IH, IC]; no norm follows those.
    """
    weights = [params.wq_b] if indexer is None else [params.wq_b, indexer.wq_b]
    heads, *index_heads = linears(latent, weights)
    heads = checkpoint_name(heads, "q_b")
    heads = heads.reshape(*latent.shape[:-1], -1, config.head_dim)
    if not index_heads:
        return heads, None
    return heads, split_index_heads(index_heads[0], config)


def rotated_queries(
    params: AttentionParams,
    latent: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    config: DSV4Config,
) -> jax.Array:
    """[..., ql], i32[...] -> [..., H, C]: heads, normed without a weight if they are, then RoPE."""
    heads, _ = project_queries(params, latent, config)
    if config.query_norm:
        heads = rms_norm_by_pairs(heads, None, eps=config.rms_norm_eps)
        heads = checkpoint_name(heads, "q_normed")
    return checkpoint_name(rotate(heads, positions[..., None], frequencies), "q")


def window_entry(
    params: AttentionParams,
    kv: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    config: DSV4Config,
) -> jax.Array:
    """Norm and RoPE, not yet rounded to a format: [..., C], positions i32[...] -> [..., C]."""
    kv = rms_norm_by_pairs(kv, params.kv_norm, eps=config.rms_norm_eps)
    return checkpoint_name(rotate(checkpoint_name(kv, "kv_normed"), positions, frequencies), "kv")


def inverse_rope(attended: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotates the last R dims by minus the position: [..., H, C], positions i32[...]."""
    attended = checkpoint_name(attended, "ctx")
    return rotate(attended, positions[..., None], frequencies, inverse=True)


Output = MaybeSplit
"""Of a sublayer, [..., D]; a product of few rows may leave it in parts."""


def output(params: AttentionParams, attended: jax.Array, config: DSV4Config) -> Output:
    """The output projection, group by group.

    Args:
      params: parameters of the layer.
      attended: [..., H, C] in the dtype of activations, after inverse RoPE; on a mesh of the heads
        that this device has.
      config: the model.

    Returns:
      [..., D], in parts where the product left it so; on a mesh those rows of [T, D] that this
      device has (`rows_of_a_device`).
    """
    lead, groups = attended.shape[:-2], params.wo_a.shape[0] // config.o_lora_rank
    heads = checkpoint_name(attended.reshape(*lead, groups, -1), "ctx_derot")
    latent = name_product(grouped_linear(heads, _by_group(params.wo_a, groups)), "o_a")
    product = linear_in_parts(latent, params.wo_b)
    if axis_size(MODEL) > 1:
        product = sum_to_rows(product)
    return name_product(product, "attn_out")


def _by_group(weight: Weight, groups: int) -> Weight:
    """[G * r, in] -> [G, r, in]. The release computes this product in BF16, whatever the others."""
    rank = weight.shape[0] // groups
    if isinstance(weight, BlockFP8) and rank % weight.block == 0:
        grouped = jax.tree.map(lambda leaf: leaf.reshape(groups, -1, leaf.shape[-1]), weight)
        return with_activations(grouped, "bfloat16")
    if is_quantized(weight):  # small models: a block of scales spans groups
        weight = decode_weight(weight).astype(weight.dtype)
    assert isinstance(weight, jax.Array)
    return weight.reshape(groups, rank, -1)
