"""Entries in a Triton kernel: where their rows lie, and what they hold.

A plane is read as the words of `triton.as_words`, four codes each, since Triton's offsets are wrong
on planes of bytes of 2 to 4 GiB. A row that is absent loads nothing and is zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.common import numbers
from pallas_kernels.common.codecs import (
    Codec,
    FP4KeyCodec,
    GroupedFP8Codec,
    PlainCodec,
    Planes,
    ScaledFP8Codec,
    WholeFP8Codec,
)
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_rope import join_neighbours

Ref = Any
_CODES_PER_WORD = 4
_BYTES_PER_WORD = 4
_E2M1_AS_F16 = np.float32(2.0**14)
"""What a value of E2M1 is of an f16 that has its bits: the biases are 1 and 15."""


class Source(NamedTuple):
    """Rows of one family of planes.

    Attributes:
      planes: refs [..., n] or, of one value per row, [...].
      row: i32[n] or i32[] for each axis but the last.
      present: bool[n], which rows to read.
    """

    planes: Mapping[str, Ref]
    row: tuple[jax.Array, ...]
    present: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """Some columns of rows.

    Attributes:
      values: [n, width], zeros from `count` on; width is a power of two.
      first: number of the first one; static.
      count: how many there are; static.
    """

    values: jax.Array
    first: int = dataclasses.field(metadata={"static": True})
    count: int = dataclasses.field(metadata={"static": True})

    def places(self) -> tuple[jax.Array, jax.Array]:
        """i32[1, width], each one's number, and bool[1, width], whether it is one."""
        column = jnp.arange(self.values.shape[1], dtype=jnp.int32)[None]
        return self.first + column, column < self.count


def find_obstacle(codec: Codec, planes: Planes) -> str | None:
    """Why FP8 planes can't be decoded here, as the rest of a sentence; None where they can."""
    whole = False
    if isinstance(codec, GroupedFP8Codec | ScaledFP8Codec):
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


def find_entries(
    entry: jax.Array, table: Ref, segment: jax.Array, *, entries_per_block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where entries of one segment lie: i32[n] block, i32[n] row in it, and bool[n] if anywhere.

    Args:
      entry: i32[n], logical numbers; -1 for none.
      table: i32[B, LB], the block table.
      segment: i32[], its row there; -1 for none.
      entries_per_block: EB.
    """
    # Three ways to be absent: no entry, no request, or beyond the table. None of them is an
    # address.
    present = (entry >= 0) & (segment >= 0) & (entry < table.shape[1] * entries_per_block)
    entry = jnp.where(present, entry, 0)
    at = jnp.maximum(segment, 0), lax.div(entry, entries_per_block)
    # The table has -1 for a block that was never given.
    block = triton.load_where(table, at, present, -1)
    return jnp.maximum(block, 0), lax.rem(entry, entries_per_block), present & (block >= 0)


def load_rows(
    sources: Sequence[Source], codec: Codec, *, dim: int, dtype: DTypeLike
) -> list[Columns]:
    """All columns of the rows of sources of which each row has one, or none, in a dtype.

    Values are those of `codecs`, but that f16 rounds what its steps of 2^-24 do not hold.
    """
    if isinstance(codec, PlainCodec):
        return [Columns(_read(sources, "values", dim).astype(dtype), 0, dim)]
    if isinstance(codec, WholeFP8Codec):
        return [Columns(_load_whole_fp8(sources, codec, dim, dtype).astype(dtype), 0, dim)]
    if isinstance(codec, FP4KeyCodec):
        return [Columns(_load_fp4(sources, codec, dim, dtype).astype(dtype), 0, dim)]
    rope_dim = sources[0].planes["rope"].shape[-1]
    nope_dim = dim - rope_dim
    words = _read(sources, "nope", nope_dim // _CODES_PER_WORD)  # u32[n, words]
    scale = _load_scales(sources, codec, nope_dim, words.shape)  # f32[n, words]
    # f16 holds codes times powers of two, and multiplies two in one instruction.
    scale = scale.astype(jnp.float16 if dtype == jnp.float16 else jnp.float32)

    def decode(number: int) -> jax.Array:
        # [n, words]: the number-th code of each word, so that decoding needs no lane of another
        # thread.
        code = lax.bitcast_convert_type(_byte(words, number).astype(jnp.uint8), jnp.float8_e4m3fn)
        value = code.astype(scale.dtype) * scale
        return value if isinstance(codec, GroupedFP8Codec) else value.astype(jnp.bfloat16)

    # Codes 4 w + i of words w go back to their order.
    nope = join_neighbours([decode(number) for number in range(_CODES_PER_WORD)])
    rope = _read(sources, "rope", rope_dim)  # [n, width], as it is
    return [
        Columns(nope.astype(dtype), 0, nope_dim),
        Columns(rope.astype(dtype), nope_dim, rope_dim),
    ]


def _load_whole_fp8(
    sources: Sequence[Source], codec: WholeFP8Codec, dim: int, dtype: DTypeLike
) -> jax.Array:
    """[n, width], all columns of rows in E4M3."""
    words = _read(sources, "codes", dim // _CODES_PER_WORD)  # u32[n, words]
    stored = _load_scale_bytes(sources, codec.group, dim, _CODES_PER_WORD, words.shape)
    # f16 holds codes times powers of two, and multiplies two in one instruction.
    scale = numbers.decode_ue8m0(stored).astype(_wide(dtype))

    def decode(number: int) -> jax.Array:
        code = lax.bitcast_convert_type(_byte(words, number).astype(jnp.uint8), jnp.float8_e4m3fn)
        return code.astype(scale.dtype) * scale

    # Codes 4 w + i of words w go back to their order.
    return join_neighbours([decode(number) for number in range(_CODES_PER_WORD)])


def _load_fp4(
    sources: Sequence[Source], codec: FP4KeyCodec, dim: int, dtype: DTypeLike
) -> jax.Array:
    """[n, width], all columns of rows in E2M1, under scales that are E4M3 or UE8M0."""
    codes_per_word = 2 * _BYTES_PER_WORD
    words = _read(sources, "codes", dim // codes_per_word)  # u32[n, words]
    stored = _load_scale_bytes(sources, codec.group, dim, codes_per_word, words.shape)
    in_order = tuple(range(3, 32, 4))
    signs = numbers.SIGN_BITS if codec.interleaves_signs(dim) else in_order
    if codec.power_of_two:  # which f16 may not hold
        scale = numbers.decode_ue8m0(stored)
    else:
        scale = lax.bitcast_convert_type(stored.astype(jnp.uint8), jnp.float8_e4m3fn)
        scale = scale.astype(_wide(dtype))

    def decode(number: int) -> jax.Array:
        # Two bits of the exponent and one of the significand are those of an f16 too, subnormal
        # where the exponent is 0; its bias makes each value 2^14 too small.
        code, sign = words >> np.uint32(4 * number), words >> np.uint32(signs[number])
        bits = ((code & 7) << 9) | ((sign & 1) << 15)
        value = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(scale.dtype)
        return value * _E2M1_AS_F16.astype(scale.dtype) * scale

    return join_neighbours([decode(number) for number in range(codes_per_word)])


def _wide(dtype: DTypeLike) -> Any:
    """What values in 16 bits are computed in."""
    return jnp.float16 if dtype == jnp.float16 else jnp.float32


def _load_scales(
    sources: Sequence[Source], codec: Codec, nope_dim: int, shape: tuple[int, ...]
) -> jax.Array:
    """f32 of the shape of the words of codes: the factor of each."""
    if not isinstance(codec, GroupedFP8Codec):
        return jnp.broadcast_to(_read_word(sources, "inv_scale")[:, None], shape)
    stored = _load_scale_bytes(sources, codec.group, nope_dim, _CODES_PER_WORD, shape)
    return numbers.decode_ue8m0(stored)


def _load_scale_bytes(
    sources: Sequence[Source], group: int, dim: int, codes_per_word: int, shape: tuple[int, ...]
) -> jax.Array:
    """u32 of the shape of the words of codes: the byte of scale of each, one for each group."""
    number = lax.div(jnp.arange(shape[1], dtype=jnp.int32) * codes_per_word, group)
    word_number, number = lax.div(number, _BYTES_PER_WORD), lax.rem(number, _BYTES_PER_WORD)
    # A row's few words of scales are loaded whole, and chosen by column: a gather would ask per
    # code.
    words = jnp.zeros(shape, jnp.uint32)
    for n in range(pl.cdiv(pl.cdiv(dim, group), _BYTES_PER_WORD)):
        word = jnp.broadcast_to(_read_word(sources, "scale", n)[:, None], shape)
        words = jnp.where((word_number == n)[None], word, words)
    return _byte(words, number[None])


def _read(sources: Sequence[Source], name: str, count: int) -> jax.Array:
    """[n, width], the columns of each row from the source that has it."""
    column = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    values = None
    for planes, row, present in sources:
        at = (*(i[:, None] if i.ndim else i for i in row), column[None])
        loaded = triton.load_where(planes[name], at, present[:, None] & (column < count)[None])
        # A row is in one source at most; the others' masked loads gave it zeros.
        values = loaded if values is None else jnp.where(present[:, None], loaded, values)
    assert values is not None
    return values


def _read_word(sources: Sequence[Source], name: str, *column: int) -> jax.Array:
    """[n], one element of each row from the source that has it."""
    values = None
    for planes, row, present in sources:
        at = (*row, *(jnp.int32(c) for c in column))
        # Absent rows have an address of the array, and are not loaded.
        loaded = triton.load_where(planes[name], at, present)
        values = loaded if values is None else jnp.where(present, loaded, values)
    assert values is not None
    return values


def _byte(words: jax.Array, number: jax.Array | int) -> jax.Array:
    """The byte of that number of u32, 0 being the lowest, as u32."""
    shift = jnp.broadcast_to(jnp.asarray(number, jnp.uint32) * 8, words.shape)
    return words >> shift & 0xFF
