"""Parameters of an attention sublayer, named after the released checkpoint."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec
from dsv4_jax.config.layer_types import AttentionType
from pallas_kernels.common.weights import Weight


@flax.struct.dataclass(kw_only=True)
class CompressorParams:
    """The projections of one compressor; width is 2 * C for CSA (b-stream, a-stream), C for HCA.

    Attributes:
      wkv: [width, D], values.
      wgate: [width, D], gate scores.
      ape: f32[M, width], added to the score of the token at position % M.
      norm: [C], weight of the entry's norm.
    """

    wkv: jax.Array
    wgate: jax.Array
    ape: jax.Array
    norm: jax.Array


@flax.struct.dataclass(kw_only=True)
class SourceParams:
    """What a layer makes entries and index keys with that other layers read too.

    Attributes:
      wkv: [C, D], a token's value.
      wgate: [C, D], its gate score; None where an entry is one token's.
      norm: [C], weight of the latent's norm.
      wk: [IC, C], index key from the latent.
      k_norm: [IC], weight of the key's norm.
    """

    wkv: jax.Array
    wgate: jax.Array | None
    norm: jax.Array
    wk: jax.Array
    k_norm: jax.Array


@flax.struct.dataclass(kw_only=True)
class IndexerParams:
    """What selects entries for a CSA layer.

    Attributes:
      wq_b: [IH * IC, ql], index queries from the query latent.
      weights_proj: [IH, D], weight of each index head.
      compressor: the compressor of the index keys; None where keys come from the latent of entries,
        of this layer or another.
    """

    wq_b: Weight
    weights_proj: jax.Array
    compressor: CompressorParams | None


@flax.struct.dataclass(kw_only=True)
class AttentionParams:
    """One attention sublayer.

    Attributes:
      wq_a: [ql, D], query latent.
      q_norm: [ql].
      wq_b: [H * C, ql].
      wkv: [C, D], the window entry.
      kv_norm: [C].
      attn_sink: f32[H], logit of the sink.
      wo_a: [G * r, H / G * C], output projection of each group of heads.
      wo_b: [D, G * r].
      compressor: of CSA and HCA layers that make entries for themselves alone.
      indexer: of CSA layers that select.
      source: of layers that make entries which others read too.
    """

    wq_a: Weight
    q_norm: jax.Array
    wq_b: Weight
    wkv: Weight
    kv_norm: jax.Array
    attn_sink: jax.Array
    wo_a: Weight
    wo_b: Weight
    compressor: CompressorParams | None
    indexer: IndexerParams | None
    source: SourceParams | None = None


def f32_shape(*shape: int) -> Any:
    """A stand-in for an f32 array, whatever the dtype of activations."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def attention_shapes(config: DSV4Config, spec: LayerSpec, array: Any) -> AttentionParams:
    """Shapes of one attention sublayer; `array(*shape)` gives one in the dtype of activations."""
    attn = spec.attn
    d, heads, c, rank = (
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.q_lora_rank,
    )
    compressor = indexer = source = None
    if attn != AttentionType.SWA and not spec.shares:
        compressor = _compressor_shapes(config, attn, c, array)
    # A layer of V4 that reuses a selection has the weights to select, and does not read them.
    if attn == AttentionType.CSA and (spec.makes_selection or not spec.shares):
        index_width, keys = config.indexer_num_heads * config.indexer_head_dim, None
        if not spec.shares:
            keys = _compressor_shapes(config, attn, config.indexer_head_dim, array)
        indexer = IndexerParams(
            wq_b=array(index_width, rank),
            weights_proj=array(config.indexer_num_heads, d),
            compressor=keys,
        )
    if spec.shares and spec.makes_entries:
        source = SourceParams(
            wkv=array(c, d),
            wgate=array(c, d) if spec.ratio > 1 else None,
            norm=array(c),
            wk=array(config.indexer_head_dim, c),
            k_norm=array(config.indexer_head_dim),
        )
    latent = config.o_groups * config.o_lora_rank
    return AttentionParams(
        wq_a=array(rank, d),
        q_norm=array(rank),
        wq_b=array(heads * c, rank),
        wkv=array(c, d),
        kv_norm=array(c),
        attn_sink=f32_shape(heads),
        wo_a=array(latent, heads // config.o_groups * c),
        wo_b=array(d, latent),
        compressor=compressor,
        indexer=indexer,
        source=source,
    )


def _compressor_shapes(
    config: DSV4Config, attn: AttentionType, head_dim: int, array: Any
) -> CompressorParams:
    width = head_dim * (2 if attn == AttentionType.CSA else 1)
    compression_ratio = config.compression_ratio(attn)
    return CompressorParams(
        wkv=array(width, config.hidden_size),
        wgate=array(width, config.hidden_size),
        ape=f32_shape(compression_ratio, width),
        norm=array(head_dim),
    )
