"""MXFP4 keys into E4M3 under one scale per key, in registers.

A key has 4 groups of 32 E2M1 codes with a UE8M0 scale each. With s the largest of its scales,

    value = e4m3 * s / 64        e4m3 = E2M1 value * 64 * (group's scale / s)

which is exact while the scales lie within a factor of 2^14 of each other; below, it is rounded to
nearest, by at most 2^-10 where the key's largest code is 32 or more. A group's eight magnitudes are
eight bytes, looked up by `prmt`, four at a time. Signs are stored where a mask, and for half of the
codes a shift before it, gives them to those four: 7 instructions for eight codes.

Source: deepseek_v4.md section 4.3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import codecs, numbers
from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic

Ref = Any
plgpu: Any = mosaic_gpu
_MXFP4 = codecs.FP4KeyCodec(group=32, power_of_two=True)
HEADROOM = 64.0
"""6, the largest E2M1 value, times 64 is 384; times 128 it would exceed E4M3's 448."""
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUM_STEPS = 20
"""Powers of two between a key's scale and a group's, after which every magnitude rounds to 0."""


def magnitude_bytes() -> np.ndarray:
    """i32[20, 2]: E4M3 codes of the eight magnitudes, each row at half the scale of the last."""
    scales = np.exp2(-np.arange(_NUM_STEPS, dtype=np.float32))[:, None]
    codes = (_MAGNITUDES * np.float32(HEADROOM) * scales).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8).copy().view(np.int32)


def largest_scale(words: jax.Array) -> jax.Array:
    """i32[n] of four UE8M0 codes each -> i32[n], the largest."""
    return jnp.maximum(
        jnp.maximum(words & 255, (words >> 8) & 255),
        jnp.maximum((words >> 16) & 255, (words >> 24) & 255),
    )


def largest_scale_of_rows(words: jax.Array) -> jax.Array:
    """`largest_scale` of i32[64] in `mosaic.ROW` layout, two codes at a time."""
    return largest_scale(words) if interpreting() else _largest(words, of_pairs=False)


def largest_scale_of_pairs(words: jax.Array) -> jax.Array:
    """The largest scale of rows i and i + 32, which a thread holds, for each of them.

    Both have it in one register, so that what is multiplied by it is computed once for both.

    Args:
      words: i32[64] in `mosaic.ROW` layout, four UE8M0 codes each.

    Returns:
      i32[64], likewise.
    """
    if interpreting():
        return jnp.tile(jnp.max(largest_scale(words).reshape(2, -1), axis=0), 2)
    return _largest(words, of_pairs=True)


def _largest(words: jax.Array, *, of_pairs: bool) -> jax.Array:
    @plgpu.inline_mgpu(
        arg_types=(mosaic.ROW,),
        return_type=plgpu.ShapeDtypeStruct(words.shape, jnp.int32, layout=mosaic.ROW),
    )
    def find(_, words):
        i32 = ir.IntegerType.get_signless(32)
        one_word = ir.VectorType.get((1,), i32)
        # `ROW` gives a thread rows i and i + 32, a register each.
        of_thread = [vector.extract(register, [], [0]) for register in words.registers.flat]
        together = [of_thread] if of_pairs else [[word] for word in of_thread]
        maxima = [vector.broadcast(one_word, _largest_of(some)) for some in together]
        registers = np.empty(words.registers.shape, dtype=object)
        registers.flat[:] = maxima * (registers.size // len(maxima))
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=True)

    return find(words)


def _largest_of(words: list[ir.Value]) -> ir.Value:
    """The largest byte of some words: two 16-bit maxima at a time."""
    i32 = ir.IntegerType.get_signless(32)
    # Bytes 0 and 2 of a word, then bytes 1 and 3, as two numbers of 16 bits each; in the end the
    # upper one against the lower.
    lines = ["{", ".reg .b32 even, odd, most;", "mov.b32 most, 0;"]
    for number in range(1, len(words) + 1):
        lines += [
            f"and.b32 even, ${number}, 0x00ff00ff;",
            f"prmt.b32 odd, ${number}, 0, 0x4341;",
            "max.u16x2 even, even, odd;",
            "max.u16x2 most, most, even;",
        ]
    lines += ["shr.u32 odd, most, 16;", "max.u16x2 most, most, odd;", "and.b32 $0, most, 255;", "}"]
    return llvm.inline_asm(i32, words, "\n".join(lines), ",".join(["=r", *["r"] * len(words)]))


def unpack(
    codes: jax.Array, words: jax.Array, table: Ref, largest: jax.Array | None = None
) -> jax.Array:
    """E2M1 codes, two a byte, signs interleaved as `FP4KeyCodec` stores them, into E4M3.

    Args:
      codes: u8[64, 64] in `mosaic.EVEN_ROWS` layout, a row's 128 codes.
      words: i32[64] in `mosaic.ROW` layout, a row's four UE8M0 codes.
      table: ref of `magnitude_bytes`.
      largest: i32[64] in `mosaic.ROW` layout, the scale that takes the place of s for each row; at
        least that.

    Returns:
      e4m3[64, 128] in `mosaic.WIDE_ROWS` layout.
    """
    largest = largest_scale_of_rows(words) if largest is None else largest
    if interpreting():
        return _interpret(codes, words, table, largest)
    shape = (codes.shape[0], 2 * codes.shape[1])

    @plgpu.inline_mgpu(
        arg_types=(mosaic.EVEN_ROWS, mosaic.ROW, plgpu.RefType(), mosaic.ROW),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float8_e4m3fn, layout=mosaic.WIDE_ROWS),
    )
    def convert(_, codes, words, table, largest):
        layout = mosaic.WIDE_ROWS.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        f8 = ir.VectorType.get((16,), ir.Float8E4M3FNType.get())
        i32 = ir.IntegerType.get_signless(32)
        four_words = ir.VectorType.get((4,), i32)
        # Nothing moves between threads: a lane's 16 bytes of `EVEN_ROWS` are 32 codes of one row
        # and one group, which `WIDE_ROWS` gives the same lane as two vectors of 16.
        of_rows = zip(words.registers.flat, largest.registers.flat, strict=True)
        for row, (word_of_row, largest_of_row) in enumerate(of_rows):
            low, high = _magnitudes_of_lane(table, word_of_row, largest_of_row)
            packed = mgpu.utils.bitcast(codes.registers[row].flat[0], four_words)
            for half in range(2):
                bytes_of = []
                for word in (2 * half, 2 * half + 1):
                    eight = vector.extract(packed, [], [word])
                    bytes_of += _four_and_four(eight, low, high)
                one_word = ir.VectorType.get((1,), i32)
                whole = mgpu.utils.vector_concat([vector.broadcast(one_word, b) for b in bytes_of])
                registers[row, 0, 0, 0, 0, half, 0] = mgpu.utils.bitcast(whole, f8)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return convert(codes, words, table, largest)


def _magnitudes_of_lane(
    table: ir.Value, word: ir.Value, largest: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The two table words for the group that the lane holds of a row with these scales.

    A row's four lanes hold 32 columns each, which are its four groups.
    """
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    word, largest = (vector.extract(v, [], [0]) for v in (word, largest))
    lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(4, i32))
    select = arith.ori(lane, mgpu.c(0x4440, i32))  # the lane's byte, and bytes of zero
    asm = "prmt.b32 $0, $1, 0, $2;"
    steps = arith.subi(largest, llvm.inline_asm(i32, [word, select], asm, "=r,r,r"))
    # In the last row of the table all magnitudes are 0, and further ones would be too.
    steps = arith.minui(steps, mgpu.c(_NUM_STEPS - 1, i32))
    pointer = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(table))
    offset = arith.muli(arith.extui(i64, steps), mgpu.c(8, i64))
    byte = ir.IntegerType.get_signless(8)
    address = mgpu.utils.getelementptr(pointer, [offset], byte)
    # Nobody writes the table, so that the load may be moved and take the read-only path.
    both = llvm.load(ir.VectorType.get((2,), i32), address, alignment=8, invariant=True)
    return vector.extract(both, [], [0]), vector.extract(both, [], [1])


def _four_and_four(word: ir.Value, low: ir.Value, high: ir.Value) -> list[ir.Value]:
    """The eight codes of a word as two words of four E4M3 codes.

    Source: `numbers.interleave_signs`.
    """
    i32 = ir.IntegerType.get_signless(32)
    # `prmt` takes four nibbles as numbers of bytes; bit 3 of each would ask for a sign, and is
    # cleared. `lop3` 0xf8 is a | (b & c).
    asm = """{
      .reg .b32 select, bytes, signs;
      and.b32 select, $2, 0x77777777;
      prmt.b32 bytes, $3, $4, select;
      lop3.b32 $0, bytes, $2, 0x80808080, 0xf8;
      shr.u32 select, select, 16;
      prmt.b32 bytes, $3, $4, select;
      shl.b32 signs, $2, 4;
      lop3.b32 $1, bytes, signs, 0x80808080, 0xf8;
    }"""
    pair = llvm.StructType.get_literal([i32, i32])
    both = llvm.inline_asm(pair, [word, low, high], asm, "=&r,=&r,r,r,r")
    return [llvm.extractvalue(i32, both, [i]) for i in range(2)]


def _interpret(codes: jax.Array, words: jax.Array, table: Ref, largest: jax.Array) -> jax.Array:
    nibbles = numbers.unpack_nibbles(_MXFP4.to_pairs(codes))
    scales = jnp.stack([(words >> (8 * group)) & 255 for group in range(4)], axis=1)
    steps = jnp.minimum(largest[:, None] - scales, _NUM_STEPS - 1)
    rows = lax.bitcast_convert_type(table[...], jnp.uint8).reshape(-1, 8)
    per_code = jnp.repeat(rows[steps], nibbles.shape[1] // 4, axis=1)
    magnitude = jnp.take_along_axis(per_code, (nibbles & 7).astype(jnp.int32)[..., None], axis=2)
    return lax.bitcast_convert_type(magnitude[..., 0] | ((nibbles & 8) << 4), jnp.float8_e4m3fn)
