"""A layer on the cache whose entries other layers read too, or whose entries another layer made."""

from __future__ import annotations

import dataclasses

import jax
from jax.typing import DTypeLike

from dsv4_jax.attention.params import AttentionParams, SourceParams
from dsv4_jax.attention.projections import (
    Output,
    output,
    project_queries,
    project_source,
    project_tokens,
)
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.attention.selection import select_on_cache
from dsv4_jax.cache.append import LayerNorms, LayerTokens
from dsv4_jax.cache.candidates import select_and_limit, select_inside
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.made_entries import close_windows, write_entries
from dsv4_jax.cache.new_tokens import NewTokens, Projections
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from pallas_kernels import NormRope, encode_tokens, joined_linears
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.norm_rope import rms_norm_by_pairs
from pallas_kernels.common.rounding import round_to


def shared_attention(
    params: AttentionParams, x: jax.Array, handle: LayerCacheHandle, config: DSV4Config
) -> tuple[LayerCacheHandle, NewTokens | None, Output]:
    """One sublayer; arguments and results as in `swa_attention`.

    The handle brings what earlier layers selected and left as candidates, and takes along what this
    one did. Parameters say what it makes: entries and index keys of its own, a selection, or none.

    Source: deepseek_v41.md sections 6 and 7.
    """
    frequencies, indexer = rope_frequencies(config, AttentionType.CSA), params.indexer
    new = project_tokens(params, x, handle.positions, config, selects=indexer is not None)
    queries, index_queries = project_queries(params, new.latent, config, indexer)
    pending = new.compressor if handle.schema.pending_tokens else None
    tokens = LayerTokens(
        queries=queries, kv=new.kv, compressor=pending, index_queries=index_queries
    )
    norms = LayerNorms(
        kv=params.kv_norm,
        frequencies=frequencies,
        eps=config.rms_norm_eps,
        norms_queries=config.query_norm,
    )
    handle, appended = handle.append(tokens, norms)
    if params.source is not None:
        assert new.compressor is not None
        kept = None if appended.new_tokens is None else appended.new_tokens.compressor
        made = new.compressor if kept is None else kept  # the bits that a later call finds
        handle = _make_entries(params.source, made, handle, frequencies, config, x.dtype)
    if indexer is not None:
        assert appended.index_queries is not None
        assert new.index_weights is not None
        handle = _select(
            handle, appended.queries, appended.index_queries, new.index_weights, config
        )
    selected = handle.selected
    assert selected is not None
    attended = handle.attend(appended.queries, params.attn_sink, selected, frequencies)
    return handle, appended.new_tokens, output(params, attended.astype(x.dtype), config)


def make_shared_entries(
    params: AttentionParams, x: jax.Array, handle: LayerCacheHandle, config: DSV4Config
) -> tuple[LayerCacheHandle, Projections | None]:
    """The entries of a layer that makes some, and nothing else of its attention.

    Args:
      params: parameters of the layer.
      x: [T, D], normed.
      handle: the layer's cache in this call.
      config: the model.

    Returns:
      The handle, and what tokens of open windows leave, still to be committed; None where none do.
    """
    assert params.source is not None
    new = jax.lax.optimization_barrier(project_source(params.source, x, handle.positions))
    frequencies = rope_frequencies(config, AttentionType.CSA)
    handle = _make_entries(params.source, new, handle, frequencies, config, x.dtype)
    return handle, new if handle.schema.pending_tokens else None


def _make_entries(
    params: SourceParams,
    new: Projections,
    handle: LayerCacheHandle,
    frequencies: jax.Array,
    config: DSV4Config,
    dtype: DTypeLike,
) -> LayerCacheHandle:
    """Writes the entries that the call's tokens close, and their index keys."""
    windows, fmt = close_windows(handle, new), handle.schema.format
    means, eps = round_to(windows.means, dtype), config.rms_norm_eps
    latent = rms_norm_by_pairs(means, params.norm, eps=eps)
    [keys] = joined_linears(latent, [params.wk], [None], windows.starts, dtypes=[dtype])

    def encode(rows: jax.Array, norm: jax.Array, codec: Codec) -> Planes:
        norm_rope = NormRope(norm, frequencies, eps)
        return encode_tokens(None, rows, norm_rope, windows.starts, codec=codec)[1]

    # An entry is the latent, normed in the launch that rotates it.
    entries = encode(means, params.norm, fmt.entry)
    # What this call reads must be what a later call finds stored, to the bit.
    index_keys = encode(keys, params.k_norm, fmt.index_key)
    entries, index_keys = jax.lax.optimization_barrier((entries, index_keys))
    return write_entries(handle, entries, index_keys, windows.closing)


def _select(
    handle: LayerCacheHandle,
    queries: jax.Array,
    index_queries: jax.Array,
    weights: jax.Array,
    config: DSV4Config,
) -> LayerCacheHandle:
    """The handle with what the layer selects and, where it leaves any, candidates."""
    assert config.sources is not None
    limit, candidates = config.sources.candidates, handle.candidates
    if limit is not None and candidates is not None:
        if handle.schema.makes_candidates:
            selected, blocks = select_and_limit(handle, index_queries, weights, limit)
            return dataclasses.replace(handle, selected=selected, candidates=blocks)
        if handle.schema.takes_candidates:
            selected = select_inside(handle, index_queries, weights, candidates, limit)
            return dataclasses.replace(handle, selected=selected)
    selected, _ = select_on_cache(handle, queries, index_queries, weights, config)
    return dataclasses.replace(handle, selected=selected)
