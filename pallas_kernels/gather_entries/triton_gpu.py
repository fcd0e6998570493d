"""Triton kernel of `gather_entries` and `gather_window`: rows to dense vectors, decoded on the way.

One CTA takes a few rows of one token: it finds where they lie, loads each plane's row once, decodes
four codes per loaded word, and stores. A row that is absent loads nothing and stores zeros.

Bytes: a row's planes read and the dense row written, once. Bound by memory at thousands of rows.
It decodes FP8 entries whose nope dims and groups are multiples of four; codes are loaded as words,
since Triton's offsets are wrong on planes of bytes of 2 to 4 GiB (`pallas_kernels.gpu.triton`).
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

from pallas_kernels.common import numbers
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Codec, GroupedFP8Codec, Planes, ScaledFP8Codec
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu import triton

Ref = Any
PlaneRefs = Mapping[str, Ref]
DECODED = (GroupedFP8Codec, ScaledFP8Codec)
"""Codecs of entries that the kernel decodes."""
_ROWS = 4
_WARPS = 2
_CODES_PER_WORD = 4


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


class Source(NamedTuple):
    """Rows of one family of planes.

    Attributes:
      planes: refs [..., n] or, of one value per row, [...].
      row: i32[_ROWS] or i32[] for each axis but the last.
      present: bool[_ROWS], which rows to read.
    """

    planes: PlaneRefs
    row: tuple[jax.Array, ...]
    present: jax.Array


def find_obstacle(codec: Codec, planes: Planes) -> str | None:
    """Why the kernel can't decode these planes, as the rest of a sentence; None where it can."""
    whole = False
    if isinstance(codec, DECODED):
        group = codec.group if isinstance(codec, GroupedFP8Codec) else _CODES_PER_WORD
        nope_dim = planes["nope"].shape[-1]
        whole = group % _CODES_PER_WORD == 0 and nope_dim % _CODES_PER_WORD == 0
    if whole:
        return None
    shapes = {name: list(plane.shape[3:]) for name, plane in planes.items()}
    return (
        f"decodes FP8 entries whose nope dims and groups are multiples of {_CODES_PER_WORD}, got "
        f"{codec} and planes of {shapes}"
    )


def gather_entries(
    pool: LayerPlanes, call: CallIndices, index: jax.Array, *, dim: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """See `op.gather_entries`."""
    entries_per_block = first_plane(pool.planes).shape[2]
    num_logical = call.block_table.shape[1]
    inputs = _EntryIndices(
        layer=pool.layer.reshape(1),
        block_table=call.block_table,
        segment_ids=call.segment_ids,
        index=index,
    )

    def locate(indices: _EntryIndices, stored: Sequence[PlaneRefs], token, place, inside):
        segment = indices.segment_ids[token]
        entry = triton.load_where(indices.index, (token, place), inside, -1)
        present = (entry >= 0) & (segment >= 0) & (entry < num_logical * entries_per_block)
        entry = jnp.where(present, entry, 0)
        logical = lax.div(entry, entries_per_block)
        at = (jnp.maximum(segment, 0), logical)
        block = triton.load_where(indices.block_table, at, present, -1)
        present &= block >= 0
        where = (indices.layer[0], jnp.maximum(block, 0), lax.rem(entry, entries_per_block))
        return [Source(stored[0], where, present)]

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
        age = lax.rem(jnp.maximum(newest, 0) - place + window, window)
        position = newest - age
        present = inside & (position >= 0) & (slot >= 0)
        in_call = position >= indices.lengths[token]
        where = (indices.layer[0], jnp.maximum(slot, 0), jnp.where(inside, place, 0))
        return [
            Source(stored[0], where, present & ~in_call),
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
    names = list(planes[0])

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        tile, token = pl.program_id(0), pl.program_id(1)
        place = tile * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
        inside = place < num_places
        indices_refs = type(indices)(*inputs[: len(indices)])
        refs = iter(inputs[len(indices) :])
        stored_refs = [{n: next(refs) for n in names} for _ in planes]
        sources = locate(indices_refs, stored_refs, token, place, inside)

        def store(values: jax.Array, start: int, count: int) -> None:
            column = lax.broadcasted_iota(jnp.int32, values.shape, 1)
            live = inside[:, None] & (column < count)
            triton.store_where(
                outputs[0], (token, place[:, None], start + column), values.astype(dtype), live
            )

        rope_dim = sources[0].planes["rope"].shape[-1]
        nope_dim = dim - rope_dim
        store(_decode_nope(sources, codec, nope_dim // _CODES_PER_WORD), 0, nope_dim)
        store(_read(sources, "rope", _columns(rope_dim)), nope_dim, rope_dim)
        present = functools.reduce(jnp.logical_or, (s.present for s in sources))
        triton.store_where(outputs[1], (token, place), present, inside)

    dense, present = triton.launch(
        kernel,
        grid=(-(-num_places // _ROWS), num_tokens),
        inputs=[*indices, *(p[n] for p in planes for n in names)],
        outputs=[
            jax.ShapeDtypeStruct((*shape, dim), dtype),
            jax.ShapeDtypeStruct(shape, jnp.bool_),
        ],
        num_warps=_WARPS,
        name=name,
    )
    return dense, present


def _decode_nope(sources: Sequence[Source], codec: Codec, num_words: int) -> jax.Array:
    """f32[_ROWS, n] of the nope dims, zeros from there to the next power of two."""
    word, live = _columns(num_words)
    codes = _read(sources, "nope", (word, live))
    if isinstance(codec, GroupedFP8Codec):
        group = lax.div(word * _CODES_PER_WORD, codec.group)
        scales = _read(sources, "scale", (lax.div(group, _CODES_PER_WORD), live))
        scale = numbers.decode_ue8m0(_byte(scales, lax.rem(group, _CODES_PER_WORD)[None]))
    else:
        scale = _read(sources, "inv_scale")[:, None]
    first, second, third, fourth = (
        numbers.decode_e4m3(_byte(codes, n)) * scale for n in range(_CODES_PER_WORD)
    )
    pairs = [jnp.stack([first, third], axis=-1), jnp.stack([second, fourth], axis=-1)]
    nope = jnp.stack(pairs, axis=-1).reshape(_ROWS, -1)
    return nope if isinstance(codec, GroupedFP8Codec) else nope.astype(jnp.bfloat16)


def _read(
    sources: Sequence[Source],
    name: str,
    columns: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """[_ROWS, n], columns of each row from the source that has it; zeros where none has.

    Of the columns, i32[n] and bool[n], those that are not live read nothing. Without columns,
    [_ROWS]: a plane of one value per row.
    """
    values = None
    for planes, row, mask in sources:
        if columns is not None:
            column, live = columns
            mask = mask[:, None] & live[None]
            row = (*(i[:, None] if i.ndim else i for i in row), column[None])
        found = triton.load_where(planes[name], row, mask)
        values = found if values is None else jnp.where(mask, found, values)
    assert values is not None
    return values


def _columns(count: int) -> tuple[jax.Array, jax.Array]:
    """0, 1, ... up to the next power of two, and which of them are below the count."""
    column = jnp.arange(1 << (count - 1).bit_length(), dtype=jnp.int32)
    return column, column < count


def _byte(words: jax.Array, number: jax.Array | int) -> jax.Array:
    """u32 -> u8, the byte of that number, 0 being the lowest."""
    shift = jnp.broadcast_to(jnp.asarray(number, jnp.uint32) * 8, words.shape)
    return (words >> shift & 0xFF).astype(jnp.uint8)
