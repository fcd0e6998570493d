"""Triton kernel of `append_tokens`: rings and running pool in one launch.

Program (b, i) takes the i-th token from the end of segment b and copies its rows to the rings that
keep it. Of several tokens that share a ring row only the last one has a program, so the order of
programs does not matter. Further programs of a segment fold the tokens of its open window into
tiles of 128 channels of the running pool, a chunk of tokens while the next one's loads are in
flight; they go on from the pool before the call, or begin with an empty one. A program without a
token ends after two loads; there are B * min(max_row_tokens, W) of them.

Bytes: the rows that are kept, in and out. The launch and two dependent loads, the call's indices
and then the row, bound it.

Limits: no slot twice in a call, and the tokens of a segment lie next to each other. It compiles for
Blackwell and has not run there. Figures: docs/kernels/append_tokens.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.append_tokens.reference import Arguments
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor import triton_pool
from pallas_kernels.gpu import triton

Ref = Any
_NUM_WARPS = 4
_CHUNK = 16
_TILE = 128


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs.

    Attributes:
      layer: i32[1].
      slots, lengths, counts, offsets: i32[B], the `row_*` of `CallIndices`.
      projections: of the running pool, values and scores f32[T, C], or None.
      rows: for each ring planes [T, ...], byte planes as words.
    """

    layer: Any
    slots: Any
    lengths: Any
    counts: Any
    offsets: Any
    projections: Any
    rows: Any


class _Kept(NamedTuple):
    """Arrays that the kernel updates, and in it their refs.

    Attributes:
      rings: planes [L, NS, W, ...] each, byte planes as words.
      running: f32[L, NS, 3, C], or None.
    """

    rings: Any
    running: Any


class _Segment(NamedTuple):
    """i32[] each: a segment's tokens before the call, in it, and the first one's index in it."""

    length: jax.Array
    num_tokens: jax.Array
    offset: jax.Array


def append_tokens(arguments: Arguments) -> tuple[tuple[Planes, ...], jax.Array | None]:
    """See `op.append_tokens`."""
    rings, running, call, compression_ratio = (
        arguments.rings,
        arguments.running,
        arguments.call,
        arguments.compression_ratio,
    )
    max_count = call.max_row_tokens
    # Tokens of a segment that each ring keeps, at most.
    limits = [min(max_count, first_plane(ring).shape[2]) for ring in rings]
    last = max(limits)
    num_tiles = 0 if running is None else running.shape[3] // _channel_tile(running.shape[3])[0]

    def kernel(inputs: _Operands, kept: _Kept) -> None:
        row, back = pl.program_id(0), pl.program_id(1)
        layer, slot = inputs.layer[0], inputs.slots[row]
        segment = _Segment(inputs.lengths[row], inputs.counts[row], inputs.offsets[row])
        length, count, offset = segment
        # Programs count from the segment's last token back: a ring keeps the first so many.
        token, position = offset + count - 1 - back, length + count - 1 - back
        for ring, new, limit in zip(kept.rings, inputs.rows, limits, strict=True):
            # Two programs never write one row: of the tokens that share a ring row only the last
            # has a program.
            for name, target in ring.items():
                at = (layer, jnp.maximum(slot, 0), position % target.shape[2])
                # Padding has no slot; programs behind a segment's first token have no token.
                pl.when((slot >= 0) & (back < jnp.minimum(count, limit)))(
                    functools.partial(triton.copy_row, new[name], (token,), target, at)
                )
        # Programs after those of tokens fold a tile of channels each.
        if kept.running is not None:
            # A segment without tokens leaves its pool as it was.
            pl.when((slot >= 0) & (count > 0) & (back >= last))(
                functools.partial(
                    _fold_open_window,
                    kept.running,
                    (layer, jnp.maximum(slot, 0)),
                    inputs.projections,
                    segment,
                    back - last,
                    compression_ratio=compression_ratio,
                    chunk=min(_CHUNK, max_count, compression_ratio),
                )
            )

    written: _Kept = triton.launch(
        kernel,
        grid=(call.row_slots.shape[0], last + num_tiles),
        inputs=_Operands(
            layer=arguments.layer.reshape(1),
            slots=call.row_slots,
            lengths=call.row_lengths,
            counts=call.row_counts,
            offsets=call.row_offsets,
            projections=arguments.projections,
            rows=[triton.as_words(new) for new in arguments.rows],
        ),
        in_place=_Kept(rings=[triton.as_words(ring) for ring in rings], running=running),
        num_warps=_NUM_WARPS,
        name="append_tokens",
    )
    new_rings = (
        triton.from_words(words, ring) for words, ring in zip(written.rings, rings, strict=True)
    )
    return tuple(new_rings), written.running


def _fold_open_window(
    running: Ref,
    at: tuple[jax.Array, jax.Array],
    projections: Mapping[str, Ref],
    segment: _Segment,
    tile: jax.Array,
    *,
    compression_ratio: int,
    chunk: int,
) -> None:
    """A tile of the pool that is open after the call, from what was open before or afresh."""
    length, count, offset = segment
    end = length + count  # position behind the call's last token
    # What lies before the open window has been flushed; it may have been open before the call.
    opened = end // compression_ratio * compression_ratio
    # Of the call's tokens those of the open window alone; earlier ones are in entries.
    first = jnp.maximum(opened, length)
    num_channels, width = _channel_tile(running.shape[-1])  # of a program
    channels = {"start": tile * width, "count": num_channels}
    # Loaded, folded and stored by one program for these channels: the pool is updated in place.
    pool = triton_pool.fold_tokens(
        triton_pool.continue_pool(running, at, opened < length, **channels, width=width),
        projections,
        first=offset + first - length,
        num_tokens=end - first,
        chunk=chunk,
        **channels,
    )
    for number, value in enumerate(pool):
        triton.store_row(
            running, (*at, number), value, first=0, count=num_channels, start=tile * width
        )


def _channel_tile(channels: int) -> tuple[int, int]:
    """Channels that a program folds, and its lanes: a tile of 128, or all if that does not fit."""
    if channels % _TILE == 0:
        return _TILE, _TILE
    return channels, max(_TILE, pl.next_power_of_2(channels))
