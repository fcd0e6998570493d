"""Codes of DeepSeek-V4.1's cache in registers to f16: E4M3 and E2M1, with a row's scales as words.

A lane holds 16 neighbouring columns of a row, which have one scale: a group has 16 columns or more.
Each of its values is exact in f16, or rounded where f16 has no step for it.

Source: deepseek_v41.md section 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import numbers
from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic

plgpu: Any = mosaic_gpu
_COLUMNS = 64
"""Of a row that are decoded at once, by four lanes."""
_LANES = 4


def decode_e4m3(codes: jax.Array, words: jax.Array, *, first: int) -> jax.Array:
    """E4M3 codes under UE8M0 scales of 32 columns.

    Args:
      codes: u8[64, 64] in `mosaic.ROWS` layout.
      words: i32[64] in `mosaic.ROW` layout, four scales of each row.
      first: number of the byte in a word that is the first group's; the next one is the second's.

    Returns:
      f16[64, 64] in `mosaic.ROWS` layout.
    """
    if interpreting():
        scale = numbers.decode_ue8m0(_bytes_of_groups(words, [first, first + 1]))
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float16)
        return values * scale.astype(jnp.float16)
    # Lanes 0 and 1 hold the columns of the first group, and 2 and 3 those of the second.
    return _decode(codes, words, mosaic.ROWS, _FROM_E4M3, first=first, lanes=2)


def decode_e2m1(codes: jax.Array, words: jax.Array) -> jax.Array:
    """E2M1 codes, two a byte and the even one lowest, under E4M3 scales of 16 columns.

    Args:
      codes: u8[64, 32] in `mosaic.HALF_ROWS` layout.
      words: i32[64] in `mosaic.ROW` layout, the four scales of each row.

    Returns:
      f16[64, 64] in `mosaic.ROWS` layout.
    """
    if interpreting():
        scale = numbers.decode_e4m3(_bytes_of_groups(words, range(_LANES)))
        code = numbers.unpack_nibbles(codes).astype(jnp.uint16)
        # The bits of an f16 whose exponent is 14 too small: a table would be a constant array.
        bits = ((code & 7) << 9) | ((code >> 3) << 15)
        values = lax.bitcast_convert_type(bits, jnp.float16) * jnp.float16(2.0**14)
        return values * scale.astype(jnp.float16)
    return _decode(codes, words, mosaic.HALF_ROWS, _FROM_E2M1, first=0, lanes=1)


def _bytes_of_groups(words: jax.Array, order: Sequence[int]) -> jax.Array:
    """u8[64, 64]: for each column the byte of its group, groups of equal size."""
    stored = jnp.stack([(words >> (8 * number)) & 255 for number in order], axis=1)
    return jnp.repeat(stored.astype(jnp.uint8), _COLUMNS // stored.shape[1], axis=1)


class _Form(NamedTuple):
    """How codes are stored.

    Attributes:
      scale: PTX of $0, the scale of a lane's columns as two f16, from the byte of it in each of the
        four bytes of $1.
      codes_per_word: codes in a word.
      convert: PTX of two f16 in each of as many words as `codes_per_word` takes, from the word of
        codes and the scale, which follow them.
    """

    scale: str
    codes_per_word: int
    convert: str


_FROM_E4M3 = _Form(
    # UE8M0: the byte becomes an f32's exponent.
    scale="""{
      .reg .b32 wide;
      .reg .b16 half;
      and.b32 wide, $1, 255;
      shl.b32 wide, wide, 23;
      cvt.rn.f16.f32 half, wide;
      mov.b32 $0, {half, half};
    }""",
    codes_per_word=4,
    convert="""{
      .reg .b16 low, high;
      mov.b32 {low, high}, $2;
      cvt.rn.f16x2.e4m3x2 $0, low;
      cvt.rn.f16x2.e4m3x2 $1, high;
      mul.rn.f16x2 $0, $0, $3;
      mul.rn.f16x2 $1, $1, $3;
    }""",
)
_FROM_E2M1 = _Form(
    scale="""{
      .reg .b16 pair, other;
      mov.b32 {pair, other}, $1;
      cvt.rn.f16x2.e4m3x2 $0, pair;
    }""",
    codes_per_word=8,
    # The upper bytes of f16 0, 0.5, 1, 1.5 and 2, 3, 4, 6, whose lower bytes are 0: `prmt` takes
    # four codes as numbers of bytes. In a selector its bit 3 asks for the byte's highest bit, eight
    # times: so it gives the signs, from the word, which has those of odd codes there, and the word
    # shifted by a code. `lop3` 0xf8 is a | (b & c).
    convert="""{
      .reg .b32 select, even, some, others, signs;
      and.b32 select, $4, 0x77777777;
      shl.b32 even, $4, 4;
      prmt.b32 some, 0x3e3c3800, 0x46444240, select;
      shr.u32 select, select, 16;
      prmt.b32 others, 0x3e3c3800, 0x46444240, select;
      prmt.b32 signs, $4, even, 0x9d8c;
      lop3.b32 some, some, signs, 0x80808080, 0xf8;
      prmt.b32 signs, $4, even, 0xbfae;
      lop3.b32 others, others, signs, 0x80808080, 0xf8;
      prmt.b32 $0, some, 0, 0x1404;
      prmt.b32 $1, some, 0, 0x3424;
      prmt.b32 $2, others, 0, 0x1404;
      prmt.b32 $3, others, 0, 0x3424;
      mul.rn.f16x2 $0, $0, $5;
      mul.rn.f16x2 $1, $1, $5;
      mul.rn.f16x2 $2, $2, $5;
      mul.rn.f16x2 $3, $3, $5;
    }""",
)


def _decode(
    codes: jax.Array, words: jax.Array, layout: Any, form: _Form, *, first: int, lanes: int
) -> jax.Array:
    """f16[64, 64]; scales are bytes of a row's word from `first` on, of so many lanes each."""
    shape = codes.shape[0], _COLUMNS

    @plgpu.inline_mgpu(
        arg_types=(layout, mosaic.ROW),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=mosaic.ROWS),
    )
    def convert(_, codes, words):
        i32 = ir.IntegerType.get_signless(32)
        result = mosaic.ROWS.to_mgpu()
        registers = np.empty(result.registers_shape(shape), dtype=object)
        eight = ir.VectorType.get((8,), ir.F16Type.get())
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(_LANES, i32))
        byte = arith.addi(arith.divui(lane, mgpu.c(lanes, i32)), mgpu.c(first, i32))
        select = arith.muli(byte, mgpu.c(0x1111, i32))  # that byte, four times
        for row, word_of_row in enumerate(words.registers.flat):
            word_of_row = vector.extract(word_of_row, [], [0])
            asm = "prmt.b32 $0, $1, 0, $2;"
            stored = llvm.inline_asm(i32, [word_of_row, select], asm, "=r,r,r")
            scale = llvm.inline_asm(i32, [stored], form.scale, "=r,r")
            pairs = []
            for register in codes.registers[row].flat:
                count = mgpu.bitwidth(register.type) // 32
                stored = mgpu.utils.bitcast(register, ir.VectorType.get((count,), i32))
                for number in range(count):
                    word = vector.extract(stored, [], [number])
                    pairs += _convert_word(word, scale, form)
            # A lane's 16 columns are two vectors of eight.
            for side in range(2):
                registers[row, 0, 0, 0, 0, side, 0] = mgpu.utils.bitcast(
                    mgpu.utils.vector_concat(pairs[4 * side : 4 * side + 4]), eight
                )
        return mgpu.FragmentedArray(_registers=registers, _layout=result, _is_signed=None)

    return convert(codes, words)


def _convert_word(word: ir.Value, scale: ir.Value, form: _Form) -> list[ir.Value]:
    """A word of codes as vectors of one word, two f16 each."""
    i32 = ir.IntegerType.get_signless(32)
    count = form.codes_per_word // 2
    # Written before the last operand is read.
    constraints = ",".join(["=&r"] * count + ["r", "r"])
    several = llvm.StructType.get_literal([i32] * count)
    given = llvm.inline_asm(several, [word, scale], form.convert, constraints)
    one_word = ir.VectorType.get((1,), i32)
    parts = [llvm.extractvalue(i32, given, [number]) for number in range(count)]
    return [vector.broadcast(one_word, part) for part in parts]
