"""Triton kernels of `pack_rows`, `unpack_rows` and `sum_rows`: rows of all planes in one launch.

    planes u32[L, A, c] ── a tile of a plane's part of a row per program ── packed u32[n, m / 4]
                                                └── sums of the tile, u32[n, tiles, 2]

All planes are seen as words; that is a view. A plane's part of a row is cut into tiles of as many
words, and program (t, i) moves tile t of row i, whichever plane that is of: the planes' ranges of
tiles are static. A tile runs on through layers. Its words go in groups of up to 4, the most that
lie next to each other on both sides and begin at multiples of 16 bytes. XLA adds up the tiles'
sums, which are exact in any order.

Bytes: every row is read once and written once, which bounds it; the checksums' 22 instructions a
word run beside.

Limits: a plane has whole words at one place of a layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.common import checksums
from pallas_kernels.gpu import triton
from pallas_kernels.pack_rows import reference
from pallas_kernels.pack_rows.reference import plane_bytes

Ref = Any
_WORD_BYTES = 4
_GROUP = 4
"""Words of one load or store of a thread, at most."""
_TILE = 2048
"""Words of a program: with 128 threads, four loads of 16 bytes each that are on their way."""
_NUM_WARPS = 4


class _Part(NamedTuple):
    """A plane's part of a row, in words.

    Attributes:
      chunk: words of one layer at one place.
      num_words: of all layers.
      start: the first one's number in the row.
      first_tile: the number of its first tile.
      group: words that go together.
    """

    chunk: int
    num_words: int
    start: int
    first_tile: int
    group: int

    @property
    def num_tiles(self) -> int:
        return pl.cdiv(self.num_words, _TILE)


class _Words(NamedTuple):
    """Where a tile's words are, [groups, group] each.

    Attributes:
      layer: i32, index into L.
      rest: i32, number of the word in its layer.
      column: i32, number of the word in the row.
      inside: bool, whether the plane has it.
    """

    layer: jax.Array
    rest: jax.Array
    column: jax.Array
    inside: jax.Array


def find_obstacle(planes: Sequence[jax.Array]) -> str | None:
    """Why the kernels can't move rows of these planes, or None."""
    for number, plane in enumerate(planes):
        size = math.prod(plane.shape[2:]) * plane.dtype.itemsize
        if size % _WORD_BYTES:
            return (
                f"needs whole words of {_WORD_BYTES} bytes in each layer, and planes[{number}] "
                f"{plane.dtype}{list(plane.shape)} has {size} bytes"
            )
    return None


def find_obstacle_of_width(width: int) -> str | None:
    """Why the kernel can't add up rows of so many bytes, or None."""
    if width % _WORD_BYTES:
        return f"needs rows of whole words of {_WORD_BYTES} bytes, got {width} bytes"
    return None


def pack_rows(planes: Sequence[jax.Array], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `op.pack_rows`."""
    count, width = rows.shape[0], sum(map(plane_bytes, planes))
    if not count * width:
        return reference.pack_rows(planes, rows)
    parts = _parts_of(planes)
    num_tiles = parts[-1].first_tile + parts[-1].num_tiles

    def kernel(inputs: tuple[list[Ref], Ref], outputs: tuple[Ref, Ref]) -> None:
        (plane_refs, rows_ref), (packed_ref, sums_ref) = inputs, outputs
        tile, i = pl.program_id(0), pl.program_id(1)
        row = rows_ref[i]

        def move(plane: Ref, part: _Part) -> None:
            at = _words_of(part, tile)
            is_there = (row >= 0) & (row < plane.shape[1])
            # A row that is not there is zeros.
            index = (at.layer, jnp.where(is_there, row, 0), at.rest)
            # The last tile of a plane reaches beyond its words, and those are not loaded.
            words = triton.load_where(plane, index, at.inside & is_there)
            triton.store_where(packed_ref, (i, at.column), words, at.inside)  # u32[groups, group]
            _store_sums(sums_ref, (i, tile), words, at)

        for plane, part in zip(plane_refs, parts, strict=True):
            pl.when(_is_of(part, tile))(functools.partial(move, plane, part))

    packed, sums = triton.launch(
        kernel,
        grid=(num_tiles, count),
        inputs=([_as_words(plane) for plane in planes if plane_bytes(plane)], rows),
        outputs=(
            jax.ShapeDtypeStruct((count, width // _WORD_BYTES), jnp.uint32),
            jax.ShapeDtypeStruct((count, num_tiles, 2), jnp.uint32),
        ),
        num_warps=_NUM_WARPS,
        name="pack_rows",
    )
    return _as_bytes(packed), jnp.sum(sums, axis=1, dtype=jnp.uint32)


def unpack_rows(planes: Sequence[jax.Array], rows: jax.Array, packed: jax.Array) -> list[jax.Array]:
    """See `op.unpack_rows`."""
    count = rows.shape[0]
    if not packed.size:
        return list(planes)
    parts = _parts_of(planes)

    def kernel(inputs: tuple[Ref, Ref], plane_refs: list[Ref]) -> None:
        rows_ref, packed_ref = inputs
        tile, i = pl.program_id(0), pl.program_id(1)
        row = rows_ref[i]

        def move(plane: Ref, part: _Part) -> None:
            at = _words_of(part, tile)
            # Words behind the plane's are the next plane's, and another tile's.
            words = triton.load_where(packed_ref, (i, at.column), at.inside)
            triton.store_where(plane, (at.layer, row, at.rest), words, at.inside)

        for plane, part in zip(plane_refs, parts, strict=True):
            is_there = (row >= 0) & (row < plane.shape[1])
            # A row that is not there is left alone, as if its program had not run.
            pl.when(_is_of(part, tile) & is_there)(functools.partial(move, plane, part))

    written = triton.launch(
        kernel,
        grid=(parts[-1].first_tile + parts[-1].num_tiles, count),
        inputs=(rows, _bytes_as_words(packed)),
        in_place=[_as_words(plane) for plane in planes if plane_bytes(plane)],
        num_warps=_NUM_WARPS,
        name="unpack_rows",
    )
    found: Iterator[jax.Array] = iter(written)
    return [_from_words(next(found), plane) if plane_bytes(plane) else plane for plane in planes]


def sum_rows(packed: jax.Array) -> jax.Array:
    """See `op.sum_rows`."""
    if not packed.size:
        return reference.sum_rows(packed)
    words = _bytes_as_words(packed)
    count, width = words.shape
    part = _Part(width, width, 0, 0, math.gcd(width, _GROUP))

    def kernel(packed_ref: Ref, sums_ref: Ref) -> None:
        tile, i = pl.program_id(0), pl.program_id(1)
        at = _words_of(part, tile)
        # The last tile ends with the row.
        found = triton.load_where(packed_ref, (i, at.column), at.inside)
        _store_sums(sums_ref, (i, tile), found, at)

    sums = triton.launch(
        kernel,
        grid=(part.num_tiles, count),
        inputs=words,
        outputs=jax.ShapeDtypeStruct((count, part.num_tiles, 2), jnp.uint32),
        num_warps=_NUM_WARPS,
        name="sum_rows",
    )
    return jnp.sum(sums, axis=1, dtype=jnp.uint32)


def _parts_of(planes: Sequence[jax.Array]) -> list[_Part]:
    """Those planes that have anything, in order."""
    width = sum(map(plane_bytes, planes)) // _WORD_BYTES
    parts, start, tiles = [], 0, 0
    for plane in planes:
        count = plane_bytes(plane) // _WORD_BYTES
        if count:
            chunk = count // plane.shape[0]
            # Words that one load takes: as many as divide all places at which one begins.
            group = math.gcd(chunk, start, width, _GROUP)
            parts.append(_Part(chunk, count, start, tiles, group))
            start, tiles = start + count, tiles + parts[-1].num_tiles
    return parts


def _is_of(part: _Part, tile: jax.Array) -> jax.Array:
    """Whether a tile of the row is of this plane."""
    return (tile >= part.first_tile) & (tile < part.first_tile + part.num_tiles)


def _words_of(part: _Part, tile: jax.Array) -> _Words:
    """Words of a tile of the row, which is one of this plane."""
    groups = _TILE // part.group
    number = (tile - part.first_tile) * groups + jnp.arange(groups, dtype=jnp.int32)  # [groups]
    # Divided once for a group: its words are of one layer.
    of_layer = jnp.int32(part.chunk // part.group)
    layer, rest = jax.lax.div(number, of_layer), jax.lax.rem(number, of_layer)
    word = jnp.arange(part.group, dtype=jnp.int32)[None]
    shape = (groups, part.group)
    return _Words(
        layer=jnp.broadcast_to(layer[:, None], shape),
        rest=rest[:, None] * part.group + word,
        column=part.start + number[:, None] * part.group + word,
        inside=jnp.broadcast_to((number < part.num_words // part.group)[:, None], shape),
    )


def _store_sums(
    sums_ref: Ref, index: tuple[jax.Array, jax.Array], words: jax.Array, at: _Words
) -> None:
    """What a tile adds to the checksums of its row."""
    place = (at.column + 1).astype(jnp.uint32)
    for half, factor in enumerate(checksums.FACTORS):
        mixed = checksums.mix_bits(words ^ (place * factor))
        # A zero adds something too, and words beyond the plane are not of it.
        mixed = jnp.where(at.inside, mixed, jnp.uint32(0))
        sums_ref[(*index, jnp.int32(half))] = jnp.sum(mixed, dtype=jnp.uint32)


def _as_words(plane: jax.Array) -> jax.Array:
    """A plane [L, A, ...] as u32[L, A, c]; a view."""
    lead, width = plane.shape[:2], np.dtype(plane.dtype).itemsize
    chunk = math.prod(plane.shape[2:]) * width // _WORD_BYTES
    split = () if width == _WORD_BYTES else (_WORD_BYTES // width,)
    return jax.lax.bitcast_convert_type(plane.reshape(*lead, chunk, *split), jnp.uint32)


def _from_words(words: jax.Array, plane: jax.Array) -> jax.Array:
    """The inverse, of the shape and dtype that the plane had."""
    return jax.lax.bitcast_convert_type(words, plane.dtype).reshape(plane.shape)


def _bytes_as_words(packed: jax.Array) -> jax.Array:
    """u8[n, m] as u32[n, m / 4]; a view."""
    split = packed.reshape(packed.shape[0], -1, _WORD_BYTES)
    return jax.lax.bitcast_convert_type(split, jnp.uint32)


def _as_bytes(words: jax.Array) -> jax.Array:
    """The inverse."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)
