"""Attention over whole sequences at once, without a cache: for training and for checking.

It says the same as the cached layers by other means: plain softmaxes over whole windows, dense
masks, no rings. Only the formulas of scores and attention are shared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.compressor import compress_sequence
from dsv4_jax.attention.indexer import index_weights, project_index_queries
from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import (
    Output,
    inverse_rope,
    output,
    project_input,
    rotated_queries,
    window_entry,
)
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.attention.selection import Selection, Selector, select, select_by_score
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from pallas_kernels.common.formats import CacheFormat
from pallas_kernels.common.norm_rope import rotate
from pallas_kernels.index_scores.reference import index_scores
from pallas_kernels.sparse_attention.reference import attend


def attend_full_sequence(
    params: AttentionParams,
    x: jax.Array,
    attn: AttentionType,
    config: DSV4Config,
    fmt: CacheFormat,
    selector: Selector = select_by_score,
    reused: jax.Array | None = None,
) -> tuple[jax.Array | None, Output]:
    """One attention sublayer over tokens 0 .. T - 1.

    Args:
      params: parameters of the layer.
      x: [B, T, D], normed.
      attn: type of the layer.
      config: the model.
      fmt: rounds what a cache of that format would round.
      selector: picks the entries of CSA layers.
      reused: bool[B, T, E], entries that an earlier CSA layer selected for this one; None selects.

    Returns:
      bool[B, T, E], the entries that a CSA layer selected, None of other layers; and [B, T, D].

    Source: deepseek_v4.md sections 1.3, 2 and 3.
    """
    frequencies = rope_frequencies(config, attn)
    tokens = jnp.arange(x.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(tokens[None], x.shape[:2])
    latent, kv = project_input(params, x, config)
    q = rotated_queries(params, latent, positions, frequencies, config)
    window = fmt.round_entry(
        window_entry(params, kv, positions, frequencies, config), config.rope_dim
    )
    age = tokens[:, None] - tokens[None]
    keys, valid = [window], [(age >= 0) & (age < config.sliding_window)]
    if attn != AttentionType.SWA:
        compressor = params.compressor
        assert compressor is not None
        entries = compress_sequence(compressor, x, frequencies, attn, config)
        entries = fmt.round_entry(checkpoint_name(entries, "comp/entries"), config.rope_dim)
        visible = (tokens + 1) // config.compression_ratio(attn)
        mask = jnp.arange(entries.shape[1])[None] < visible[:, None]
        if attn == AttentionType.CSA:
            if reused is None:
                scores = _scores(params, x, latent, positions, frequencies, config, fmt)
                seen = jnp.broadcast_to(visible[None], x.shape[:2])
                selection = Selection(scores, seen, positions, config.indexer_top_k, q, entries)
                reused = select(selector, selection, config.idea.max_selected)
            mask = mask[None] & reused
        keys.append(entries)
        valid.append(mask)
    batch = x.shape[0]
    valid = [jnp.broadcast_to(v, (batch, *v.shape[-2:])) for v in valid]
    attended = attend(
        q,
        jnp.concatenate(keys, axis=1)[:, None],
        jnp.concatenate(valid, axis=-1),
        params.attn_sink,
        scale=config.head_dim**-0.5,
    )
    attended = inverse_rope(attended.astype(x.dtype), positions, frequencies)
    return reused, output(params, attended, config)


def _scores(
    params: AttentionParams,
    x: jax.Array,
    latent: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    config: DSV4Config,
    fmt: CacheFormat,
) -> jax.Array:
    """Index scores [B, T, E]; no gradient reaches the layer's input, which the indexer observes."""
    indexer = params.indexer
    assert indexer is not None
    assert indexer.compressor is not None
    x, latent = jax.lax.stop_gradient((x, latent))
    keys = compress_sequence(
        indexer.compressor, x, frequencies, AttentionType.CSA, config, name="idx"
    )
    keys = fmt.round_index(checkpoint_name(keys, "idx/keys"))
    heads = project_index_queries(indexer, latent, config)
    heads = checkpoint_name(rotate(heads, positions[..., None], frequencies), "idx/q")
    index_q = fmt.round_index(heads)  # as `round_index_queries` gives them to a cached layer
    scores = index_scores(index_q, index_weights(indexer, x), keys[:, None])
    return checkpoint_name(scores, "idx/scores")
