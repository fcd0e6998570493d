"""Definition of `append_tokens`: new tokens into what a request keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.addressing import drop_absent, write_rows
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor.pooling import empty_pool, fold_tokens


class Arguments(NamedTuple):
    """The arguments of `op.append_tokens`, which describes and checks them."""

    rings: Sequence[Planes]
    rows: Sequence[Planes]
    running: jax.Array | None
    projections: Planes | None
    call: CallIndices
    layer: jax.Array
    compression_ratio: int


def append_ring(
    ring: Planes, rows: Planes, slots: jax.Array, positions: jax.Array, *, layer: jax.Array
) -> Planes:
    """Token at position p of a slot goes to ring row p % W.

    W = 4, positions 5 6 7 8 of one request:   row 1 2 3 0
    """
    num_rows = jax.tree.leaves(ring)[0].shape[2]  # W
    return write_rows(ring, rows, layer, slots, positions % num_rows)


def append_running(
    running: jax.Array,
    projections: Planes,
    call: CallIndices,
    *,
    layer: jax.Array,
    compression_ratio: int,
) -> jax.Array:
    """Folds each request's new tokens into the running softmax of its open window.

    The window open after the call starts at `(length + count) // M * M`; what lies before
    it has been flushed.
    """
    slots, lengths = call.row_slots, call.row_lengths  # i32[B] each
    end = lengths + call.row_counts  # i32[B]
    opened = end // compression_ratio * compression_ratio  # i32[B]
    carried = (opened < lengths)[:, None, None]  # bool[B, 1, 1]
    first = jnp.maximum(opened, lengths)  # i32[B]
    old = running[layer, jnp.maximum(slots, 0)]  # f32[B, 3, C]
    empty = empty_pool(old.shape[0], old.shape[-1])  # f32[B, 3, C]
    pool = fold_tokens(
        jnp.where(carried, old, empty),
        projections["values"],
        projections["scores"],
        start=call.row_offsets + first - lengths,
        count=end - first,
        max_count=min(call.max_row_tokens, compression_ratio),
    )
    is_there = (slots >= 0) & (call.row_counts > 0)
    writes = drop_absent(slots, running.shape[1], is_there=is_there)
    return running.at[layer, writes].set(pool, mode="drop")


def append_tokens(arguments: Arguments) -> tuple[tuple[Planes, ...], jax.Array | None]:
    """`append_ring` of each ring, of tokens that share a row the last one, and `append_running`."""
    call, layer = arguments.call, arguments.layer
    lengths, counts, offsets = call.row_lengths, call.row_counts, call.row_offsets  # i32[B] each
    tokens = jnp.arange(jax.tree.leaves(arguments.rows)[0].shape[0])[:, None]  # i32[T, 1]
    member = (tokens >= offsets[None]) & (tokens < (offsets + counts)[None])  # bool[T, B]
    row = jnp.argmax(member, axis=1)  # i32[T], the segment of each token
    positions = (lengths - offsets)[row] + tokens[:, 0]  # i32[T]
    live = jnp.where(jnp.any(member, axis=1), call.row_slots[row], -1)  # i32[T], slots
    appended = []
    for ring, new in zip(arguments.rings, arguments.rows, strict=True):
        size = jax.tree.leaves(ring)[0].shape[2]  # W
        last = positions >= (lengths + counts)[row] - size  # bool[T]
        kept = jnp.where(last, live, -1)  # i32[T]
        appended.append(append_ring(ring, new, kept, positions, layer=layer))
    running, projections = arguments.running, arguments.projections
    if running is not None and projections is not None:
        running = append_running(
            running, projections, call, layer=layer, compression_ratio=arguments.compression_ratio
        )
    return tuple(appended), running
