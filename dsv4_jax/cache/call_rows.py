"""A call's tokens as one layer will keep them, and how they get into ring and states."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.cache.step_input import CallIndices
from pallas_kernels.formats import Planes


@flax.struct.dataclass(kw_only=True)
class Projections:
    """What a call's tokens give to one compressor.

    Attributes:
      values: f32[T, width].
      scores: f32[T, width], position bias added.
    """

    values: jax.Array
    scores: jax.Array


@flax.struct.dataclass(kw_only=True)
class CallRows:
    """A call's tokens, as one layer will keep them once they are committed.

    Attributes:
      window: planes [T, ...], encoded window entries.
      compressor: projections on CSA and HCA layers, else None.
      indexer: projections on CSA layers, else None.
    """

    window: Planes
    compressor: Projections | None
    indexer: Projections | None


def commit_rows(
    state: StateCachePool, rows: CallRows, call: CallIndices, *, layer: jax.Array
) -> StateCachePool:
    """Writes a call's tokens into one layer's ring and compressor states.

    Of several tokens that share a row of a ring, the last one is written.
    """
    row = jnp.maximum(call.request_ids, 0)
    ends = (call.row_lengths + call.row_counts)[row]

    def append(ring: Planes, new: Planes, size: int) -> Planes:
        last = call.positions >= ends - size
        slots = jnp.where(last, call.slots, -1)
        return pk.append_ring(ring, new, slots, call.positions, layer=layer)

    def append_tail(tail: Planes, new: Projections) -> Planes:
        planes = {"values": new.values, "scores": new.scores}
        return append(tail, planes, state.schema.tail_buffer_size)

    tail, index_tail, running = state.tail, state.index_tail, state.running
    if tail is not None and rows.compressor is not None:
        tail = append_tail(tail, rows.compressor)
    if index_tail is not None and rows.indexer is not None:
        index_tail = append_tail(index_tail, rows.indexer)
    if running is not None and rows.compressor is not None:
        running = pk.append_running(
            running,
            rows.compressor.values,
            rows.compressor.scores,
            call.row_slots,
            call.row_lengths,
            call.row_counts,
            call.row_offsets,
            layer=layer,
            rate=state.schema.tail_buffer_size_a,
            max_count=call.max_row_tokens,
        )
    window = append(state.window, rows.window, state.schema.swa_window_size)
    return dataclasses.replace(
        state, window=window, tail=tail, index_tail=index_tail, running=running
    )
