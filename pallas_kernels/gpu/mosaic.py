"""What Mosaic GPU kernels here share: register layouts of gathered rows, and products."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.common.backend import interpreting

Ref = Any
Layout = Any
plgpu: Any = mosaic_gpu  # whose annotations describe its insides and not what callers may do

ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 64), (8, 16), (8,))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
"""[32 i, 64 j]: a warp holds 8 rows, 4 lanes a row, a lane 16 neighbouring columns in two vectors.

Loads of 16 bytes and more, and stores of 16 bytes that fill all banks of a 128-byte swizzle.
"""
ROW = ROWS.reduce(1)
"""[32 i]: one value per row of `ROWS`."""
WIDE_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 128), (8, 32), (16,))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
"""[32 i, 128 j] of bytes: as `ROWS`, a lane holding 32 neighbouring columns."""
EVEN_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 64), (8, 16))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)
"""[32 i, 64 j] of bytes: as `ROWS`, in one vector. Neighbouring lanes load neighbouring bytes."""
HALF_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 32), (8, 8))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)
"""[32 i, 32 j] of bytes: as `ROWS`, a lane holding 8 neighbouring columns in one vector."""
LINES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""[4 i, 128 j] of words: a warp holds a row, its lanes side by side."""

SWIZZLED_BYTES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Shared memory of 16-bit elements as tensor cores and bulk copies take it."""


def quotient_and_remainder(numbers: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotients and remainders of i32 that are not negative; shifts, where that is enough."""
    if divisor & (divisor - 1):
        return lax.div(numbers, divisor), lax.rem(numbers, divisor)
    return numbers >> (divisor.bit_length() - 1), numbers & (divisor - 1)


def opaque(number: int | jax.Array) -> jax.Array:
    """The same i32, which the compiler can't know to be the same.

    What is computed from it is computed anew each time around a loop. Descriptors of operands that
    never move would else be kept, some 60 of them, in registers that there are not.
    """
    if interpreting():
        return jnp.int32(number)
    layout = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=layout)
    )
    def move(_, value):
        i32 = ir.IntegerType.get_signless(32)
        [register] = value.registers.flat
        # Said to have side effects, so that it stays in the loop and no two are merged.
        moved = llvm.inline_asm(i32, [register], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(moved, (), is_signed=True)

    return move(jnp.int32(number))


def swap_neighbours(values: jax.Array, layout: Layout) -> jax.Array:
    """[M, N] whose columns 2i and 2i + 1 change places, in a layout where a thread holds both."""
    if interpreting():
        pairs = values.reshape(values.shape[0], -1, 2)
        return jnp.stack([pairs[..., 1], pairs[..., 0]], axis=-1).reshape(values.shape)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=layout),
    )
    def swap(_, values):
        registers = np.empty(values.registers.shape, dtype=object)
        for index, register in np.ndenumerate(values.registers):
            # Neighbouring columns are in one register: no lane gives anything to another.
            swapped = [i ^ 1 for i in range(ir.VectorType(register.type).shape[0])]
            registers[index] = vector.shuffle(register, register, swapped)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=values.layout, _is_signed=values.is_signed
        )

    return swap(values)


def multiply_add(total: jax.Array, left: Ref, right: Ref) -> jax.Array:
    """The sum of a total and left @ right, in f32, by one warpgroup of a Hopper GPU.

    Args:
      total: f32[M, N], in WGMMA layout.
      left: [M, K] in shared memory, `SWIZZLED`.
      right: [K, N] in shared memory, `SWIZZLED`.
    """
    if interpreting():  # which has no accumulators that start from a value
        return total + multiply([(left, right)])

    def product(total_ref: Ref) -> None:
        plgpu.wgmma(total_ref, left, right)

    return pl.run_state(product)(plgpu.ACC.init(total))


def multiply(pairs: Sequence[tuple[Ref, Ref]], ready: Sequence[Ref] = ()) -> jax.Array:
    """The sum of left @ right over pairs, in f32, by one warpgroup of a Hopper GPU.

    Args:
      pairs: [M, K] and [K, N], both in shared memory, `SWIZZLED`.
      ready: barriers of the first pairs, each waited for before its pair is read.
    """
    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]

    def product(total_ref: Ref) -> jax.Array:
        for (left, right), barrier in itertools.zip_longest(pairs, ready):
            if barrier is not None:
                # The products begun so far run while the next pair is waited for.
                plgpu.barrier_wait(barrier)
            plgpu.wgmma(total_ref, left, right)
        return total_ref[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def multiply_registers(left: jax.Array, right: Ref) -> jax.Array:
    """Multiplies left @ right.T in f32, by one warpgroup of a Hopper GPU.

    An accumulator of `ACC` would be fenced when it is made, and the operand once more when it is
    there: twice a product the four warps would wait for each other.

    Args:
      left: e4m3[64, K] in `WGMMA_8BIT` layout.
      right: e4m3[N, K] in shared memory, `SWIZZLED_BYTES`.
    """
    shape = left.shape[0], right.shape[0]
    if interpreting():
        return left.astype(jnp.float32) @ right[...].astype(jnp.float32).T

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_8BIT, plgpu.RefType(SWIZZLED_BYTES)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def product(_, left, right):
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        zeros = mgpu.FragmentedArray.splat(zero, shape, mgpu.WGMMA_LAYOUT)
        # Without a fence: no product that could still write these registers is running.
        total = mgpu.WGMMAAccumulator.from_registers(zeros, sync=False)
        # A view [K, N] of the tiles of right; its bytes stay K-major, as FP8 operands have to be.
        right = mgpu.memref_transpose(right, (1, 0, 3, 2))
        total = mgpu.wgmma(total, left, right, swizzle=128)
        nvvm.wgmma_commit_group_sync_aligned()  # one group, this product
        nvvm.wgmma_wait_group_sync_aligned(0)  # until no group runs
        # The registers are written asynchronously: nothing that reads them may be moved above the
        # wait.
        return mgpu.optimization_barrier(total.value)

    return product(left, right)
