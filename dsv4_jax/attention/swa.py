"""A window layer on the cache: append, attend to the window, project."""

from __future__ import annotations

import jax

from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import output, queries, query_latent, window_entry
from dsv4_jax.attention.rope import rope_frequencies
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
      The handle, holding the call's tokens but not yet committed, and [T, D].

    Source: deepseek_v4.md section 1.3.
    """
    frequencies = rope_frequencies(config, AttentionType.SWA)
    positions = handle.positions
    q = queries(params, query_latent(params, x, config), positions, frequencies, config)
    handle = handle.write_swa(window_entry(params, x, positions, frequencies, config))
    attended = handle.attend(q, params.attn_sink, None).astype(x.dtype)
    return handle, output(params, attended, positions, frequencies, config)
