"""Append: a call's tokens, and the entries of the windows that they close, into one layer.

There are two ways, with one result. Where no row of the call has more than one token, everything
is written in place, in one launch. Else the entries are written, and ring and compressor states
stay as they were, since a query in the middle of the call still reads them: the call's tokens are
returned, to be committed later (`commit.py`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.struct
import jax

import pallas_kernels as pk
from dsv4_jax.cache.new_tokens import NewTokens, Projections
from dsv4_jax.cache.paged_cache import PagedKVPool
from dsv4_jax.cache.state_cache import StateCachePool
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes


@flax.struct.dataclass(kw_only=True)
class LayerTokens:
    """A call's tokens as a layer projects them.

    Attributes:
      queries: [T, H, C], neither normed nor rotated.
      kv: [T, C], likewise.
      compressor: projections on CSA and HCA layers that make entries, else None.
      indexer: projections on CSA layers whose index keys have a compressor, else None.
      index_queries: [T, IH, IC], not rotated, on CSA layers that select; else None.
    """

    queries: jax.Array
    kv: jax.Array
    compressor: Projections | None = None
    indexer: Projections | None = None
    index_queries: jax.Array | None = None


@flax.struct.dataclass(kw_only=True)
class LayerNorms:
    """The norms of a layer's tokens and entries, and its RoPE table.

    Attributes:
      kv: [C], norm weight of the window entries.
      compressor: [C], norm weight of the entries; None where there are none.
      indexer: [IC], norm weight of the index keys; None where there are none.
      frequencies: f32[R / 2], radians per position.
      eps: floor of the norms.
      norms_queries: each query head is normed before it rotates.
    """

    kv: jax.Array
    frequencies: jax.Array
    compressor: jax.Array | None = None
    indexer: jax.Array | None = None
    eps: float = flax.struct.field(pytree_node=False)
    norms_queries: bool = flax.struct.field(pytree_node=False, default=True)

    @property
    def of_tokens(self) -> pk.NormRope:
        """Of queries and window entries."""
        return pk.NormRope(self.kv, self.frequencies, self.eps, self.norms_queries)


class Appended(NamedTuple):
    """What an append gives back beside the updated pools.

    Attributes:
      queries: [T, H, C], normed and rotated, or as projected where attention is to do that.
      index_queries: [T, IH, IC], rotated and rounded as index keys are; None where there were
        none.
      window: planes [T, ...], the call's window entries as stored.
      new_tokens: what ring and states still have to take; None where they have taken it.
    """

    queries: jax.Array
    index_queries: jax.Array | None
    window: Planes
    new_tokens: NewTokens | None


Pools = tuple[StateCachePool, PagedKVPool | None]


def append_in_place(
    pools: Pools, tokens: LayerTokens, norms: LayerNorms, call: CallIndices, *, layer: jax.Array
) -> tuple[Pools, Appended]:
    """Appends at most one token per row: ring, states and entries in one launch.

    Args:
      pools: state pool, and blocks or None.
      tokens: the call's tokens.
      norms: of the layer.
      call: the call's indices; no row has more than one token.
      layer: i32[], index into the pools' stacked arrays.

    Source: deepseek_v4.md sections 1.3, 2, 3 and 4.
    """
    state, paged = pools
    fmt = state.schema.format
    projections = (tokens.compressor, tokens.indexer)
    done = pk.append_and_flush(
        tokens.queries,
        tokens.kv,
        pk.LayerPlanes(state.window, layer, fmt.ring),
        [] if paged is None else _compressors((state, paged), projections, norms),
        call,
        norms.of_tokens,
        compression_ratio=state.schema.compression_ratio,
        index_queries=tokens.index_queries,
        index_codec=None if tokens.index_queries is None else fmt.index_key,
    )
    names = ("running",) if state.running is not None else ("tail", "index_tail")
    state = dataclasses.replace(
        state, window=done.ring, **dict(zip(names, done.states, strict=False))
    )
    if paged is not None:
        families = dict(zip(("entries", "index_keys"), done.pools, strict=False))
        paged = dataclasses.replace(paged, **families)
    window = jax.lax.optimization_barrier(done.rows)
    return (state, paged), Appended(done.queries, done.index_queries, window, None)


def append_uncommitted(
    pools: Pools,
    tokens: LayerTokens,
    norms: LayerNorms,
    call: CallIndices,
    *,
    layer: jax.Array,
    norms_queries: bool = True,
) -> tuple[Pools, Appended]:
    """Appends any number of tokens per row: entries now, ring and states when they are committed.

    Arguments as in `append_in_place`. Without `norms_queries` these are left as projected.
    """
    state, paged = pools
    fmt = state.schema.format
    queries, window = pk.encode_tokens(
        tokens.queries if norms_queries else None,
        tokens.kv,
        norms.of_tokens,
        call.positions,
        codec=fmt.ring,
    )
    new = hold(NewTokens(window=window, compressor=tokens.compressor, indexer=tokens.indexer))
    if paged is not None:
        paged = flush_windows((state, paged), new, norms, call, layer=layer)
    index_queries = tokens.index_queries
    if index_queries is not None:
        index_queries = pk.round_index_queries(
            index_queries, norms.frequencies, call.positions, codec=fmt.index_key
        )
    queries = tokens.queries if queries is None else queries
    return (state, paged), Appended(queries, index_queries, new.window, new)


def hold(new: NewTokens) -> NewTokens:
    """The same tokens, computed once.

    What this call reads must be what a later call finds stored, to the bit: without the barrier,
    XLA may compute a row twice and round it differently.
    """
    return jax.lax.optimization_barrier(new)


def flush_windows(
    pools: tuple[StateCachePool, PagedKVPool],
    new: NewTokens,
    norms: LayerNorms,
    call: CallIndices,
    *,
    layer: jax.Array,
) -> PagedKVPool:
    """Compresses the windows that a call closes, and writes their entries and index keys.

    Args:
      pools: of a CSA or HCA layer, state as it was before the call.
      new: the call's tokens.
      norms: of the layer.
      call: the call's indices.
      layer: i32[], index into the pools' stacked arrays.

    Source: deepseek_v4.md sections 2.2 and 3.
    """
    state, paged = pools
    compressors = _compressors(pools, (new.compressor, new.indexer), norms)
    where = {"layer": layer, "compression_ratio": state.schema.compression_ratio, "eps": norms.eps}
    if state.running is not None:
        (compressor,) = compressors
        entries = pk.flush_hca(compressor, call, norms.frequencies, **where)
        return dataclasses.replace(paged, entries=entries)
    entries, index_keys = pk.flush_csa(compressors, call, norms.frequencies, **where)
    return dataclasses.replace(paged, entries=entries, index_keys=index_keys)


def _compressors(
    pools: tuple[StateCachePool, PagedKVPool],
    projections: tuple[Projections | None, Projections | None],
    norms: LayerNorms,
) -> list[pk.Compressor]:
    """The main compressor of a CSA or HCA layer and, on a CSA layer, the indexer's."""
    state, paged = pools
    main, indexer = projections
    fmt = state.schema.format
    kept = state.tail if state.running is None else state.running
    assert kept is not None
    assert main is not None
    assert norms.compressor is not None
    compressors = [pk.Compressor(kept, main.planes, norms.compressor, paged.entries, fmt.entry)]
    if indexer is not None:
        assert state.index_tail is not None
        assert norms.indexer is not None
        assert paged.index_keys is not None
        compressors.append(
            pk.Compressor(
                state.index_tail, indexer.planes, norms.indexer, paged.index_keys, fmt.index_key
            )
        )
    return compressors
