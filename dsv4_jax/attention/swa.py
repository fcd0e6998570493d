"""An SWA (sliding window attention) layer on the cache: append, attend to the window."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import (
    Output,
    output,
    project_entries,
    project_queries,
    project_tokens,
)
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.cache.append import LayerNorms, LayerTokens, hold
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.new_tokens import NewTokens
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from pallas_kernels import NormRope, encode_tokens


def swa_attention(
    params: AttentionParams, x: jax.Array, handle: LayerCacheHandle, config: DSV4Config
) -> tuple[LayerCacheHandle, NewTokens | None, Output]:
    """One SWA sublayer.

    Args:
      params: parameters of the layer.
      x: [T, D], normed.
      handle: the layer's cache in this call.
      config: the model.

    Returns:
      The handle, what is still to be committed (None if nothing), and [T, D].

    Source: deepseek_v4.md section 1.3.
    """
    frequencies = rope_frequencies(config, AttentionType.SWA)
    new = project_tokens(params, x, handle.positions, config)
    queries, _ = project_queries(params, new.latent, config)
    tokens = LayerTokens(queries=queries, kv=new.kv)
    norms = LayerNorms(
        kv=params.kv_norm,
        frequencies=frequencies,
        eps=config.rms_norm_eps,
        norms_queries=config.query_norm,
    )
    handle, appended = handle.append(tokens, norms, attends_next=True)
    attended = handle.attend(appended.queries, params.attn_sink, None, frequencies)
    return handle, appended.new_tokens, output(params, attended.astype(x.dtype), config)


def window_tokens(
    layers: Sequence[AttentionParams],
    x: jax.Array,
    positions: jax.Array,
    state: StateCachePool,
    config: DSV4Config,
) -> list[NewTokens]:
    """What layers of the same input are to commit of it, where nothing attends.

    Args:
      layers: parameters of each layer.
      x: [T, D], normed.
      positions: i32[T].
      state: the pool of window layers.
      config: the model.
    """
    frequencies, eps, new = rope_frequencies(config, AttentionType.SWA), config.rms_norm_eps, []
    for layer, kv in zip(layers, project_entries(layers, x, positions), strict=True):
        norm_rope = NormRope(layer.kv_norm, frequencies, eps)
        _, window = encode_tokens(None, kv, norm_rope, positions, codec=state.schema.format.ring)
        new.append(hold(NewTokens(window=window, compressor=None, indexer=None)))
    return new
