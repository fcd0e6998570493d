"""A call's tokens as one layer will keep them, and how they get into ring and states."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax

import pallas_kernels as pk
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.cache.step_input import CallIndices
from pallas_kernels.codecs import Planes


@flax.struct.dataclass(kw_only=True)
class Projections:
    """What a call's tokens give to one compressor.

    Attributes:
      values: f32[T, width].
      scores: f32[T, width], position bias added.
    """

    values: jax.Array
    scores: jax.Array

    @property
    def planes(self) -> Planes:
        """Both, by name."""
        return {"values": self.values, "scores": self.scores}


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
    rings, new = [state.window], [rows.window]
    for tail, projections in ((state.tail, rows.compressor), (state.index_tail, rows.indexer)):
        if tail is not None and projections is not None:
            rings.append(tail)
            new.append(projections.planes)
    folds = state.running is not None and rows.compressor is not None
    (window, *tails), running = pk.append_tokens(
        rings,
        new,
        state.running if folds else None,
        rows.compressor.planes if folds and rows.compressor is not None else None,
        call.row_slots,
        call.row_lengths,
        call.row_counts,
        call.row_offsets,
        layer=layer,
        rate=state.schema.tail_buffer_size_a,
        max_count=call.max_row_tokens,
    )
    tail, index_tail = tails or (state.tail, state.index_tail)
    return dataclasses.replace(
        state, window=window, tail=tail, index_tail=index_tail, running=running
    )
