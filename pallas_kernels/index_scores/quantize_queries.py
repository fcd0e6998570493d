"""Index queries into E4M3 under one scale per head, by a warpgroup of the kernel that wants them.

Queries come rounded as keys are, so that they are exact in E4M3 where a head's group scales lie
within a factor of 2^14. A head's scale, a power of two, goes into its weight.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic

Ref = Any
plgpu: Any = mosaic_gpu
ROWS = 16
"""Heads that a warpgroup loads and quantises at a time, each warp four, a whole row at once."""
_LAYOUT = mosaic.LINES
BY_ROW = _LAYOUT.reduce(1)
_ROOM = 0x1FFFFF
"""Carries into the exponent what has a mantissa above that of 448 = 1.75 * 2^8, E4M3's largest."""


def load_heads(queries: Ref, weights: Ref) -> tuple[jax.Array, jax.Array]:
    """Rows of shared memory into registers.

    Args:
      queries: f32[16, IC].
      weights: f32[16].

    Returns:
      f32[16, IC] in `mosaic.LINES` layout and f32[16] in `BY_ROW` layout.
    """
    values = plgpu.load(queries, layout=_LAYOUT, optimized=False)
    return values, plgpu.load(weights, layout=BY_ROW, optimized=False)


def quantize(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What was loaded as codes, and weights times scales.

    Returns:
      e4m3[16, IC] in `mosaic.LINES` layout and f32[16] in `BY_ROW` layout.
    """
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(values), axis=1), jnp.int32)
    scale = jnp.maximum(((largest + _ROOM) >> 23) - 8, 1)  # UE8M0
    inverse = lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    inverse = plgpu.layout_cast(lax.broadcast_in_dim(inverse, values.shape, [0]), _LAYOUT)
    codes = _to_e4m3(values * inverse)
    return codes, weights * lax.bitcast_convert_type(scale << 23, jnp.float32)


def _to_e4m3(values: jax.Array) -> jax.Array:
    """f32[M, N] -> e4m3[M, N], to nearest."""
    if interpreting():
        return values.astype(jnp.float8_e4m3fn)
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float8_e4m3fn, layout=_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=result)
    def convert(_, values):
        i32 = ir.IntegerType.get_signless(32)
        f8 = ir.VectorType.get((values.layout.vector_length,), ir.Float8E4M3FNType.get())
        one = ir.VectorType.get((1,), i32)
        asm = """{
          .reg .b16 low, high;
          cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
          cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
          mov.b32 $0, {low, high};
        }"""
        registers = np.empty(values.registers.shape, dtype=object)
        for place, register in np.ndenumerate(values.registers):
            numbers = [vector.extract(register, [], [i]) for i in range(f8.shape[0])]
            words = [
                llvm.inline_asm(i32, numbers[i : i + 4], asm, "=r,f,f,f,f")
                for i in range(0, len(numbers), 4)
            ]
            packed = mgpu.utils.vector_concat([vector.broadcast(one, word) for word in words])
            registers[place] = mgpu.utils.bitcast(packed, f8)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return convert(values)
