"""What attention does first in every layer: its tokens and the entries they complete, appended."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax

import pallas_kernels as pk
from dsv4_jax.cache.call_rows import CallRows, Projections
from dsv4_jax.cache.flush import maybe_flush_csa, maybe_flush_hca
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.layer_schedule import AttentionType


@flax.struct.dataclass(kw_only=True)
class LayerTokens:
    """A call's tokens as a layer projects them.

    Attributes:
      queries: [T, H, C], neither normed nor rotated.
      kv: [T, C], likewise.
      compressor: projections on CSA and HCA layers, else None.
      indexer: projections on CSA layers, else None.
      index_queries: [T, IH, IC], not rotated, on CSA layers that select; else None.
    """

    queries: jax.Array
    kv: jax.Array
    compressor: Projections | None = None
    indexer: Projections | None = None
    index_queries: jax.Array | None = None


@flax.struct.dataclass(kw_only=True)
class LayerNorms:
    """What norms and rotates a layer's tokens and entries.

    Attributes:
      kv: [C], norm weight of the window entries.
      compressor: [C], of the compressor, None where there is none.
      indexer: [IC], of the indexer's compressor, None where there is none.
      frequencies: f32[R / 2], of the layer's table.
      eps: floor of the norms.
    """

    kv: jax.Array
    frequencies: jax.Array
    compressor: jax.Array | None = None
    indexer: jax.Array | None = None
    eps: float = flax.struct.field(pytree_node=False)


def append_and_flush(
    handle: LayerCacheHandle, tokens: LayerTokens, norms: LayerNorms
) -> tuple[LayerCacheHandle, jax.Array, jax.Array | None]:
    """Takes a call's tokens and writes the entries of the windows that they close.

    A handle that is `in_place` takes them into ring and states at once, in one launch; then
    `commit` has nothing left to do. Else they become its rows, and ring and states stay as they
    were, which a token in the middle of a call still needs.

    Args:
      handle: of the layer, without rows.
      tokens: as projected.
      norms: of the layer.

    Returns:
      The handle; the queries [T, H, C], normed and rotated; and the index queries f32[T, IH, IC],
      rotated and rounded as index keys are, None where there were none.

    Source: deepseek_v4.md sections 1.3, 2, 3 and 4.
    """
    if handle.in_place:
        return _append_in_place(handle, tokens, norms)
    queries, window = pk.encode_tokens(
        tokens.queries,
        tokens.kv,
        norms.kv,
        norms.frequencies,
        handle.positions,
        codec=handle.schema.format.entry,
        eps=norms.eps,
    )
    rows = CallRows(window=window, compressor=tokens.compressor, indexer=tokens.indexer)
    handle = handle.with_rows(rows)
    schema, shared = handle.schema, {"frequencies": norms.frequencies, "eps": norms.eps}
    if schema.attn_type == AttentionType.CSA:
        assert norms.compressor is not None
        assert norms.indexer is not None
        handle = maybe_flush_csa(
            handle,
            schema,
            schema.compression_ratio,
            norm=norms.compressor,
            indexer_norm=norms.indexer,
            **shared,
        )
    elif schema.attn_type == AttentionType.HCA:
        assert norms.compressor is not None
        handle = maybe_flush_hca(
            handle, schema, schema.compression_ratio, norm=norms.compressor, **shared
        )
    index_queries = tokens.index_queries
    if index_queries is not None:
        index_queries = pk.round_index_queries(
            index_queries,
            norms.frequencies,
            handle.positions,
            codec=handle.schema.format.index_key,
        )
    return handle, queries, index_queries


def _append_in_place(
    handle: LayerCacheHandle, tokens: LayerTokens, norms: LayerNorms
) -> tuple[LayerCacheHandle, jax.Array, jax.Array | None]:
    state, paged, fmt = handle.state, handle.paged, handle.schema.format
    compressors = []
    if paged is not None:
        kept = state.tail if state.running is None else state.running
        assert kept is not None
        assert tokens.compressor is not None
        assert norms.compressor is not None
        compressors.append(
            pk.Compressor(
                kept, tokens.compressor.planes, norms.compressor, paged.entries, fmt.entry
            )
        )
        if tokens.indexer is not None:
            assert state.index_tail is not None
            assert norms.indexer is not None
            assert paged.index_keys is not None
            compressors.append(
                pk.Compressor(
                    state.index_tail,
                    tokens.indexer.planes,
                    norms.indexer,
                    paged.index_keys,
                    fmt.index_key,
                )
            )
    done = pk.append_and_flush(
        tokens.queries,
        tokens.kv,
        norms.kv,
        norms.frequencies,
        state.window,
        compressors,
        handle.block_table,
        codec=fmt.entry,
        request_ids=handle.call.request_ids,
        slots=handle.call.slots,
        positions=handle.call.positions,
        layer=handle.layer,
        rate=handle.schema.compression_ratio,
        eps=norms.eps,
        index_queries=tokens.index_queries,
        index_codec=None if tokens.index_queries is None else fmt.index_key,
    )
    names = ("running",) if state.running is not None else ("tail", "index_tail")
    updated = dict(zip(names, done.states, strict=False))
    state = dataclasses.replace(state, window=done.ring, **updated)
    if paged is not None:
        pools = dict(zip(("entries", "index_keys"), done.pools, strict=False))
        paged = dataclasses.replace(paged, **pools)
    rows = CallRows(window=done.rows, compressor=tokens.compressor, indexer=tokens.indexer)
    handle = dataclasses.replace(handle, state=state, paged=paged, is_committed=True)
    return handle.with_rows(rows), done.queries, done.index_queries
