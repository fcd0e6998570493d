"""Triton kernel of `append_tokens`: every ring and the running pool of a layer in one launch.

Program (b, i) takes the i-th token from the end of row b and copies its rows to the rings that keep
it; one more program a row folds the tokens of its open window into the running pool. Of several
tokens that share a ring row only the last one has a program, so no order matters. A program without
a token ends after two loads; there are B * min(max_count, W) of them.

Bytes: the rows that are kept, in and out. What bounds it is the launch and two dependent loads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.compress_tail import tile as window
from pallas_kernels.formats import Planes

Ref = Any
_NUM_WARPS = 4
_CHUNK = 16


def append_tokens(
    rings: Sequence[Planes],
    rows: Sequence[Planes],
    running: jax.Array | None,
    projections: Planes | None,
    slots: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    offsets: jax.Array,
    *,
    layer: jax.Array,
    rate: int,
    max_count: int,
) -> tuple[tuple[Planes, ...], jax.Array | None]:
    """See `op.append_tokens`."""
    call = [layer.reshape(1), slots, lengths, counts, offsets]
    ring_words = [triton.as_words(ring) for ring in rings]
    row_words = [triton.as_words(new) for new in rows]
    num_tokens = [min(max_count, next(iter(ring.values())).shape[2]) for ring in rings]
    targets = [plane for ring in ring_words for plane in ring.values()]
    sources = [new[name] for ring, new in zip(rings, row_words, strict=True) for name in ring]
    folded = [] if projections is None else [projections["values"], projections["scores"]]
    limits = [n for n, ring in zip(num_tokens, rings, strict=True) for _ in ring]
    last = max(num_tokens, default=0)

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        row, place = pl.program_id(0), pl.program_id(1)
        layer, slot, length, count, offset = _read(inputs[: len(call)], row)
        token, position = offset + count - 1 - place, length + count - 1 - place
        copies = inputs[len(call) + len(folded) :]
        for source, target, limit in zip(copies, stored, limits, strict=False):
            at = (layer, jnp.maximum(slot, 0), position % target.shape[2])
            pl.when((slot >= 0) & (place < jnp.minimum(count, limit)))(
                functools.partial(_copy_row, source, token, target, at)
            )
        if folded:
            pl.when((slot >= 0) & (count > 0) & (place == last))(
                functools.partial(
                    _fold_open_window,
                    stored[-1],
                    (layer, jnp.maximum(slot, 0)),
                    inputs[len(call) : len(call) + 2],
                    (length, count, offset),
                    rate=rate,
                    chunk=min(_CHUNK, max_count, rate),
                )
            )

    written = triton.launch(
        kernel,
        grid=(slots.shape[0], last + bool(folded)),
        inputs=[*call, *folded, *sources],
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


def _copy_row(source: Ref, token: jax.Array, target: Ref, at: tuple[jax.Array, ...]) -> None:
    """source[token] to target[at]: scalars, or a row, in tiles of a power of two."""
    if len(source.shape) == 1:
        target[at] = source[token]
        return
    count = source.shape[1]
    width = 1 << (count - 1).bit_length()
    values = triton.load_row(source, (token,), start=0, count=count, width=width)
    triton.store_row(target, at, values, first=0, count=count)


def _fold_open_window(
    running: Ref,
    at: tuple[jax.Array, jax.Array],
    row_refs: Sequence[Ref],
    row: tuple[jax.Array, jax.Array, jax.Array],
    *,
    rate: int,
    chunk: int,
) -> None:
    """The pool of the window that is open after the call, from what was open before or afresh."""
    length, count, offset = row
    end = length + count
    opened = end // rate * rate
    first = jnp.maximum(opened, length)
    channels = running.shape[-1]
    width = max(128, 1 << (channels - 1).bit_length())
    pool = window.fold_tokens(
        window.continue_pool(running, at, opened < length, width=width),
        row_refs,
        start=offset + first - length,
        count=end - first,
        chunk=chunk,
    )
    for number, part in enumerate(pool):
        triton.store_row(running, (*at, number), part, first=0, count=channels)
