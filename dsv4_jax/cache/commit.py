"""Commit: a call's tokens into rings and compressor states, and into the lengths.

`commit_tokens` does it for one layer, `commit` for all layers of a staged step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from dsv4_jax import checks
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, NewTokens, check_staged
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.mesh import on_mesh
from pallas_kernels.common.addressing import drop_absent
from pallas_kernels.common.call import CallIndices


@flax.struct.dataclass(kw_only=True)
class Staged:
    """What a staged step will add to rings and states once it is committed.

    Attributes:
      new_tokens: by attention type, the call's tokens of all its layers, stacked [L, T, ...].
      call: where the tokens belong.
    """

    new_tokens: dict[str, NewTokens]
    call: CallIndices


@on_mesh("cache")
def commit(cache: ModelCache, staged: Staged, num_tokens: jax.Array) -> ModelCache:
    """Keeps the first tokens of each row of a staged step, as if only they had been run.

    Args:
      cache: the cache that `stage_step` returned; nothing else may have been committed in between.
      staged: what it returned beside the cache.
      num_tokens: i32[B], tokens to keep of each row, 0 to what it had.

    Raises:
      ValueError: `staged` is of a cache of other sizes, or `num_tokens` has another shape or dtype
        or, outside jit, keeps more of a row than it had.
    """
    checks.instance("cache", cache, ModelCache)
    checks.not_deleted("cache", cache)
    call = checks.instance("staged", staged, Staged).call
    checks.array("staged.call.block_table", call.block_table, (None, cache.block_table.shape[1]))
    checks.in_range("staged.call.row_slots", call.row_slots, -1, cache.max_requests)
    check_staged("staged", staged.new_tokens, cache.state, call.positions.shape[0])
    checks.array("num_tokens", num_tokens, (None,))
    if num_tokens.shape != call.row_slots.shape:
        raise ValueError(
            f"num_tokens must be i32{list(call.row_slots.shape)}, one per row, "
            f"got {num_tokens.shape=}"
        )
    kept, had = checks.known_values(num_tokens), checks.known_values(call.row_counts)
    if kept is not None and had is not None and np.any((kept < 0) | (kept > had)):
        raise ValueError(
            f"num_tokens must be 0 to the tokens that each row had, {had.tolist()}, "
            f"got {kept.tolist()}"
        )
    return commit_layers(cache, staged.new_tokens, call.keep(jnp.asarray(num_tokens, jnp.int32)))


def commit_layers(
    cache: ModelCache, new_tokens: Mapping[str, Family], kept: CallIndices
) -> ModelCache:
    """`commit` of a call that is cut to the tokens that are kept.

    Args:
      cache: as there.
      new_tokens: by attention type, the call's tokens of all its layers.
      kept: the call.
    """
    state = dict(cache.state)
    for attn, family in new_tokens.items():
        if isinstance(family, NewTokens):
            state[attn] = _commit_stack(state[attn], family, kept)
            continue
        for layer, new in enumerate(family):
            index = jnp.asarray(layer, jnp.int32)
            state[attn] = commit_tokens(state[attn], new, kept, layer=index)
    return advance(dataclasses.replace(cache, state=state), kept)


def _commit_stack(pool: StateCachePool, stack: NewTokens, kept: CallIndices) -> StateCachePool:
    def commit_layer(layer: jax.Array, pool: StateCachePool) -> StateCachePool:
        of_layer = jax.tree.map(lambda leaf: leaf[layer], stack)
        return commit_tokens(pool, of_layer, kept, layer=layer)

    return jax.lax.fori_loop(0, pool.num_layers, commit_layer, pool)


@jax.jit
def commit_tokens(
    state: StateCachePool, new: NewTokens, call: CallIndices, *, layer: jax.Array
) -> StateCachePool:
    """Writes a call's tokens into one layer's ring and compressor states.

    Of several tokens that share a row of a ring, the last one is written. Within a step it is
    traced and lowered once for all layers of a type.
    """
    if state.pending is not None:
        return _commit_pending(state, new, call, layer=layer)
    rings, rows = [state.window], [new.window]
    for tail, projections in ((state.tail, new.compressor), (state.index_tail, new.indexer)):
        if tail is not None and projections is not None:
            rings.append(tail)
            rows.append(projections.planes)
    folds = state.running is not None and new.compressor is not None
    (window, *tails), running = pk.append_tokens(
        rings,
        rows,
        state.running if folds else None,
        new.compressor.planes if folds and new.compressor is not None else None,
        call,
        layer=layer,
        compression_ratio=state.schema.compression_ratio,
    )
    tail, index_tail = tails or (state.tail, state.index_tail)
    return dataclasses.replace(
        state, window=window, tail=tail, index_tail=index_tail, running=running
    )


def _commit_pending(
    state: StateCachePool, new: NewTokens, call: CallIndices, *, layer: jax.Array
) -> StateCachePool:
    assert state.pending is not None
    assert new.compressor is not None
    rings, rows = [state.pending], [new.compressor.planes]
    ratio = state.schema.compression_ratio
    (pending,), _ = pk.append_tokens(
        rings, rows, None, None, call, layer=layer, compression_ratio=ratio
    )
    return dataclasses.replace(state, pending=pending)


def advance(cache: ModelCache, call: CallIndices) -> ModelCache:
    """Counts a call's tokens into the lengths."""
    slots = drop_absent(call.row_slots, cache.max_requests)
    lengths = cache.length_tokens.at[slots].add(call.row_counts, mode="drop")
    return dataclasses.replace(cache, length_tokens=lengths)
