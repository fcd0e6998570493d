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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.append_tokens.reference import Arguments
from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor import triton_pool
from pallas_kernels.gpu import triton

Ref = Any
_NUM_WARPS = 4
_CHUNK = 16
_TILE = 128


def append_tokens(arguments: Arguments) -> tuple[tuple[Planes, ...], jax.Array | None]:
    """See `op.append_tokens`."""
    rings, rows, running, projections, call, layer, rate = arguments
    per_row = [call.row_slots, call.row_lengths, call.row_counts, call.row_offsets]
    indices = [layer.reshape(1), *per_row]
    max_count = call.max_row_tokens
    ring_words = [triton.as_words(ring) for ring in rings]
    row_words = [triton.as_words(new) for new in rows]
    num_tokens = [min(max_count, next(iter(ring.values())).shape[2]) for ring in rings]
    targets = [plane for ring in ring_words for plane in ring.values()]
    sources = [new[name] for ring, new in zip(rings, row_words, strict=True) for name in ring]
    folded = [] if projections is None else [projections["values"], projections["scores"]]
    limits = [n for n, ring in zip(num_tokens, rings, strict=True) for _ in ring]
    last = max(num_tokens)
    num_tiles = 0 if running is None else running.shape[3] // _channel_tile(running.shape[3])[0]

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        row, place = pl.program_id(0), pl.program_id(1)
        layer, slot, length, count, offset = _read(inputs[: len(indices)], row)
        token, position = offset + count - 1 - place, length + count - 1 - place
        copies = inputs[len(indices) + len(folded) :]
        for source, target, limit in zip(copies, stored, limits, strict=False):
            at = (layer, jnp.maximum(slot, 0), position % target.shape[2])
            pl.when((slot >= 0) & (place < jnp.minimum(count, limit)))(
                functools.partial(triton.copy_row, source, (token,), target, at)
            )
        if folded:
            pl.when((slot >= 0) & (count > 0) & (place >= last))(
                functools.partial(
                    _fold_open_window,
                    stored[-1],
                    (layer, jnp.maximum(slot, 0)),
                    inputs[len(indices) : len(indices) + 2],
                    (length, count, offset),
                    place - last,
                    rate=rate,
                    chunk=min(_CHUNK, max_count, rate),
                )
            )

    written = triton.launch(
        kernel,
        grid=(call.row_slots.shape[0], last + num_tiles),
        inputs=[*indices, *folded, *sources],
        in_place=[*targets, *([] if running is None else [running])],
        num_warps=_NUM_WARPS,
        name="append_tokens",
    )
    planes = iter(written)
    new_rings = tuple(
        triton.from_words({name: next(planes) for name in ring}, ring) for ring in rings
    )
    return new_rings, None if running is None else next(planes)


def _read(refs: Sequence[Ref], row: jax.Array) -> tuple[jax.Array, ...]:
    layer, *per_row = refs
    return layer[0], *(ref[row] for ref in per_row)


def _fold_open_window(
    running: Ref,
    at: tuple[jax.Array, jax.Array],
    row_refs: Sequence[Ref],
    row: tuple[jax.Array, jax.Array, jax.Array],
    tile: jax.Array,
    *,
    rate: int,
    chunk: int,
) -> None:
    """A tile of the pool that is open after the call, from what was open before or afresh."""
    length, count, offset = row
    end = length + count
    opened = end // rate * rate
    first = jnp.maximum(opened, length)
    num_channels, width = _channel_tile(running.shape[-1])
    channels = {"start": tile * width, "count": num_channels}
    pool = triton_pool.fold_tokens(
        triton_pool.continue_pool(running, at, opened < length, **channels, width=width),
        row_refs,
        first=offset + first - length,
        num_tokens=end - first,
        chunk=chunk,
        **channels,
    )
    for number, part in enumerate(pool):
        triton.store_row(
            running, (*at, number), part, first=0, count=num_channels, start=tile * width
        )


def _channel_tile(channels: int) -> tuple[int, int]:
    """Channels that a program folds, and its lanes: a tile of 128, or all if that does not fit."""
    if channels % _TILE == 0:
        return _TILE, _TILE
    return channels, max(_TILE, 1 << (channels - 1).bit_length())
