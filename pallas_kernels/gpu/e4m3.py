"""Rows of f32 in registers to E4M3 and back, a word of four codes at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic

plgpu: Any = mosaic_gpu
_LAYOUT = mosaic.LINES


def encode(values: jax.Array) -> jax.Array:
    """f32[M, N] -> e4m3[M, N] in `mosaic.LINES` layout, to nearest, saturating; NaN stays NaN."""
    if interpreting():
        largest = np.float32(448)
        # Conversions of the interpreter make NaN of what exceeds 448; the instruction saturates.
        kept = jnp.where(values == values, jnp.clip(values, -largest, largest), values)
        return kept.astype(jnp.float8_e4m3fn)
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float8_e4m3fn, layout=_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=result)
    def convert(_, values):
        i32 = ir.IntegerType.get_signless(32)
        # The first operand of `cvt` becomes the upper byte.
        f8 = ir.VectorType.get((values.layout.vector_length,), ir.Float8E4M3FNType.get())
        one_word = ir.VectorType.get((1,), i32)
        asm = """{
          .reg .b16 low, high;
          cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
          cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
          mov.b32 $0, {low, high};
        }"""
        registers = np.empty(values.registers.shape, dtype=object)
        for index, register in np.ndenumerate(values.registers):
            numbers = [vector.extract(register, [], [i]) for i in range(f8.shape[0])]
            # Four f32 of a thread to a word of four codes.
            words = [
                llvm.inline_asm(i32, numbers[i : i + 4], asm, "=r,f,f,f,f")
                for i in range(0, len(numbers), 4)
            ]
            packed = mgpu.utils.vector_concat([vector.broadcast(one_word, word) for word in words])
            registers[index] = mgpu.utils.bitcast(packed, f8)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return convert(values)


def decode(codes: jax.Array) -> jax.Array:
    """e4m3[M, N] -> f32[M, N], both in `mosaic.LINES` layout."""
    if interpreting():
        return codes.astype(jnp.float32)
    result = plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout=_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=result)
    def convert(_, codes):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        # By way of f16, which holds every E4M3 value: there is no instruction to f32.
        halves = ir.VectorType.get((2,), ir.F16Type.get())
        wide = ir.VectorType.get((2,), f32)
        registers = np.empty(codes.registers.shape, dtype=object)
        for index, register in np.ndenumerate(codes.registers):
            word, pairs = mgpu.utils.bitcast(register, i32), []
            for which in ("low", "high"):
                asm = f"""{{
                  .reg .b16 low, high;
                  mov.b32 {{low, high}}, $1;
                  cvt.rn.f16x2.e4m3x2 $0, {which};
                }}"""
                # Two codes of the word at a time, as two f16 in one register.
                pair = mgpu.utils.bitcast(llvm.inline_asm(i32, [word], asm, "=r,r"), halves)
                pairs.append(arith.extf(wide, pair))
            registers[index] = mgpu.utils.vector_concat(pairs)
        return mgpu.FragmentedArray(_registers=registers, _layout=codes.layout, _is_signed=None)

    return convert(codes)
