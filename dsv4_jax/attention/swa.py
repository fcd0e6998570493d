"""A window layer on the cache: append, attend to the window, project."""

from __future__ import annotations

import jax

from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import output, project_kv, project_queries, query_latent
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.cache.append import LayerNorms, LayerTokens, append_and_flush
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.config import DSV4Config
from dsv4_jax.layer_schedule import AttentionType


def swa_attention(
    params: AttentionParams, x: jax.Array, handle: LayerCacheHandle, config: DSV4Config
) -> tuple[LayerCacheHandle, jax.Array]:
    """One SWA sublayer.

    Args:
      params: of the layer.
      x: [T, D], normed.
      handle: the layer's cache in this call.
      config: the model.

    Returns:
      The handle, holding the call's tokens, whose commit still has to follow, and [T, D].

    Source: deepseek_v4.md section 1.3.
    """
    frequencies = rope_frequencies(config, AttentionType.SWA)
    tokens = LayerTokens(
        queries=project_queries(params, query_latent(params, x, config), config),
        kv=project_kv(params, x),
    )
    norms = LayerNorms(kv=params.kv_norm, frequencies=frequencies, eps=config.rms_norm_eps)
    handle, q, _ = append_and_flush(handle, tokens, norms)
    attended = handle.attend(q, params.attn_sink, None, frequencies).astype(x.dtype)
    return handle, output(params, attended, config)
