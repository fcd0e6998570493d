"""A CSA (compressed sparse attention) layer on the cache: append, select, attend."""

from __future__ import annotations

import dataclasses

import jax

from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import Output, output, project_queries, project_tokens
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.attention.selection import select_on_cache
from dsv4_jax.cache.append import LayerNorms, LayerTokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.new_tokens import NewTokens
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType


def csa_attention(
    params: AttentionParams, x: jax.Array, handle: LayerCacheHandle, config: DSV4Config
) -> tuple[LayerCacheHandle, NewTokens | None, Output]:
    """One CSA sublayer; arguments and results as in `swa_attention`.

    With `index_reuse`, the handle brings an earlier layer's selection or takes this one's along.

    Source: deepseek_v4.md sections 1.3, 2 and 3.
    """
    compressor, indexer = params.compressor, params.indexer
    assert compressor is not None
    assert indexer is not None
    assert indexer.compressor is not None
    frequencies = rope_frequencies(config, AttentionType.CSA)
    selected = handle.selected
    new = project_tokens(params, x, handle.positions, config, selects=selected is None)
    queries, index_queries = project_queries(
        params, new.latent, config, indexer if selected is None else None
    )
    tokens = LayerTokens(
        queries=queries,
        kv=new.kv,
        compressor=new.compressor,
        indexer=new.indexer,
        index_queries=index_queries,
    )
    norms = LayerNorms(
        kv=params.kv_norm,
        compressor=compressor.norm,
        indexer=indexer.compressor.norm,
        frequencies=frequencies,
        eps=config.rms_norm_eps,
    )
    attends_next = config.idea.selector is None  # which may look at the queries
    handle, appended = handle.append(tokens, norms, attends_next=attends_next)
    queries = appended.queries
    if selected is None:
        assert appended.index_queries is not None
        assert new.index_weights is not None
        selected, queries = select_on_cache(
            handle, queries, appended.index_queries, new.index_weights, config
        )
        if config.index_reuse:
            handle = dataclasses.replace(handle, selected=selected)
    attended = handle.attend(queries, params.attn_sink, selected, frequencies)
    return handle, appended.new_tokens, output(params, attended.astype(x.dtype), config)
