"""An HCA (heavily compressed attention) layer on the cache: append, attend to every entry."""

from __future__ import annotations

import jax

from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import Output, output, project_queries, project_tokens
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.cache.append import LayerNorms, LayerTokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.new_tokens import NewTokens
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType


def hca_attention(
    params: AttentionParams, x: jax.Array, handle: LayerCacheHandle, config: DSV4Config
) -> tuple[LayerCacheHandle, NewTokens | None, Output]:
    """One HCA sublayer; arguments and results as in `swa_attention`.

    Source: deepseek_v4.md sections 1.3 and 2.
    """
    compressor = params.compressor
    assert compressor is not None
    frequencies = rope_frequencies(config, AttentionType.HCA)
    new = project_tokens(params, x, handle.positions, config)
    queries, _ = project_queries(params, new.latent, config)
    tokens = LayerTokens(queries=queries, kv=new.kv, compressor=new.compressor)
    norms = LayerNorms(
        kv=params.kv_norm,
        compressor=compressor.norm,
        frequencies=frequencies,
        eps=config.rms_norm_eps,
    )
    handle, appended = handle.append(tokens, norms, attends_next=True)
    attended = handle.attend_to_all(appended.queries, params.attn_sink, frequencies)
    return handle, appended.new_tokens, output(params, attended.astype(x.dtype), config)
