"""Triton kernel of `gather_entries` and `gather_window`: rows to dense vectors, decoded on the way.

One CTA takes a few rows of one token: it finds where they lie, loads each plane's row once, decodes
four codes per loaded word, and stores. A row that is absent loads nothing and stores zeros.

Bytes: a row's planes read and the dense row written, once. Bound by memory at thousands of rows.
It decodes FP8 entries whose nope dims and groups are multiples of four (`gpu.triton_entries`).
Measurements and roads not taken: docs/kernels/gather_entries.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_entries import Source, find_entries, load_rows

Ref = Any
PlaneRefs = Mapping[str, Ref]
_ROWS = 4
_WARPS = 2


class _EntryIndices(NamedTuple):
    """What `gather_entries` finds rows by: arrays, and refs in the kernel; the layer is i32[1]."""

    layer: Any
    block_table: Any
    segment_ids: Any
    index: Any


class _WindowIndices(NamedTuple):
    """What `gather_window` finds rows by; likewise."""

    layer: Any
    slots: Any
    positions: Any
    lengths: Any


def gather_entries(
    pool: LayerPlanes, call: CallIndices, index: jax.Array, *, dim: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """See `op.gather_entries`."""
    entries_per_block = first_plane(pool.planes).shape[2]
    inputs = _EntryIndices(
        layer=pool.layer.reshape(1),
        block_table=call.block_table,
        segment_ids=call.segment_ids,
        index=index,
    )

    def locate(indices: _EntryIndices, stored: Sequence[PlaneRefs], token, place, inside):
        # Places beyond the last have no entry, and load nothing.
        entry = triton.load_where(indices.index, (token, place), inside, -1)
        block, row, present = find_entries(
            entry,
            indices.block_table,
            indices.segment_ids[token],
            entries_per_block=entries_per_block,
        )
        return [Source(stored[0], (indices.layer[0], block, row), present)]

    return _gather(
        locate, inputs, [pool.planes], index.shape, pool.codec, dim, dtype, "gather_entries"
    )


def gather_window(
    ring: LayerPlanes, rows: Planes, call: CallIndices, *, dim: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """See `op.gather_window`; `reference` pictures which rows come from the call."""
    window = first_plane(ring.planes).shape[2]
    inputs = _WindowIndices(
        layer=ring.layer.reshape(1),
        slots=call.slots,
        positions=call.positions,
        lengths=call.lengths,
    )

    def locate(indices: _WindowIndices, stored: Sequence[PlaneRefs], token, place, inside):
        slot, newest = indices.slots[token], indices.positions[token]
        # Ring row `place` has the newest position that is congruent to it; how far back that is.
        age = lax.rem(jnp.maximum(newest, 0) - place + window, window)  # i32[_ROWS], tokens
        position = newest - age
        # Rows of a window that has not filled its ring yet, and those of padding, are absent.
        present = inside & (position >= 0) & (slot >= 0)
        in_call = position >= indices.lengths[token]
        where = (indices.layer[0], jnp.maximum(slot, 0), jnp.where(inside, place, 0))
        return [
            Source(stored[0], where, present & ~in_call),
            # Tokens of a segment lie next to each other in the call, so that a token `age` back
            # lies so many rows before.
            Source(stored[1], (jnp.maximum(token - age, 0),), present & in_call),
        ]

    shape = (call.slots.shape[0], window)
    return _gather(
        locate, inputs, [ring.planes, rows], shape, ring.codec, dim, dtype, "gather_window"
    )


def _gather(
    locate: Callable[..., Sequence[Source]],
    indices: _EntryIndices | _WindowIndices,
    stored: Sequence[Planes],
    shape: tuple[int, ...],
    codec: Codec,
    dim: int,
    dtype: DTypeLike,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Dense rows `dtype`[T, K, dim] and bool[T, K], for a function that says where they lie."""
    num_tokens, num_places = shape
    planes = [triton.as_words(p) for p in stored]

    def kernel(inputs: tuple[Any, list[PlaneRefs]], outputs: tuple[Ref, Ref]) -> None:
        indices, stored = inputs
        dense, present = outputs
        tile, token = pl.program_id(0), pl.program_id(1)
        place = tile * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
        inside = place < num_places
        # Rows and whether there is one; a row that is not there loads nothing.
        sources = locate(indices, stored, token, place, inside)

        for columns in load_rows(sources, codec, dim=dim, dtype=dtype):
            column, is_one = columns.places()
            at = token, place[:, None], column  # [_ROWS, columns]
            # Absent rows are stored too, as zeros.
            triton.store_where(dense, at, columns.values, inside[:, None] & is_one)
        # A row has one source at most.
        is_there = functools.reduce(jnp.logical_or, (s.present for s in sources))  # bool[_ROWS]
        triton.store_where(present, (token, place), is_there, inside)

    return triton.launch(
        kernel,
        grid=(pl.cdiv(num_places, _ROWS), num_tokens),
        inputs=(indices, planes),
        outputs=(
            jax.ShapeDtypeStruct((*shape, dim), dtype),
            jax.ShapeDtypeStruct(shape, jnp.bool_),
        ),
        num_warps=_WARPS,
        name=name,
    )
