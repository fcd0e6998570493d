"""Products that two warpgroups of a Hopper GPU begin in turns.

Two products that begin together take the tensor core together, and end together: it idles while
both warpgroups scale and add what they got. In turns, one multiplies while the other adds.

A warpgroup waits before each product for the other's word, which that gives once it has begun one:

    warpgroup 1    begin            wait  multiply          wait  multiply, its last
    warpgroup 0          wait  multiply         wait  multiply, its last

The interpreter has no such barriers, and multiplies without a wait.

Source: PTX ISA 9.0, bar.sync and bar.arrive.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu.mosaic import SWIZZLED_BYTES

Ref = Any
plgpu: Any = mosaic_gpu
_SCALAR = plgpu.Layout.WG_SPLAT(())
_FIRST_BARRIER = 14
"""Hardware barriers, one for each warpgroup; the compiler and bulk copies have those before."""
_THREADS = 256


def begin(group: jax.Array) -> None:
    """Before the first product: warpgroup 1 lets warpgroup 0 begin. Both call it."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(_SCALAR,))
    def let(_, group):
        i32 = ir.IntegerType.get_signless(32)
        _arrive(mgpu.c(_FIRST_BARRIER, i32), group.registers.flat[0])

    let(group)


def multiply(left: Ref | jax.Array, right: Ref, group: jax.Array, is_last: jax.Array) -> jax.Array:
    """Multiplies left @ right.T in f32, by warpgroup 0 or 1, once the other has begun a product.

    Args:
      left: e4m3[64, K] in shared memory, `SWIZZLED_BYTES`, or in `WGMMA_8BIT` layout.
      right: e4m3[N, K] in shared memory, `SWIZZLED_BYTES`.
      group: i32[], the warpgroup; both multiply as often.
      is_last: bool[], this is its last product.
    """
    in_registers = isinstance(left, jax.Array)
    shape = left.shape[0], right.shape[0]
    if interpreting():
        values = left if in_registers else left[...]
        return values.astype(jnp.float32) @ right[...].astype(jnp.float32).T
    kind = plgpu.Layout.WGMMA_8BIT if in_registers else plgpu.RefType(SWIZZLED_BYTES)

    @plgpu.inline_mgpu(
        arg_types=(kind, plgpu.RefType(SWIZZLED_BYTES), _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def product(_, left, right, group, wanted):
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        group, wanted = group.registers.flat[0], wanted.registers.flat[0]
        first = mgpu.c(_FIRST_BARRIER, i32)
        mine = arith.addi(group, first)
        other = arith.subi(mgpu.c(2 * _FIRST_BARRIER + 1, i32), mine)
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        zeros = mgpu.FragmentedArray.splat(zero, shape, mgpu.WGMMA_LAYOUT)
        llvm.inline_asm(
            None, [mine], f"bar.sync $0, {_THREADS};", "r,~{memory}", has_side_effects=True
        )
        total = mgpu.WGMMAAccumulator.from_registers(zeros, sync=not in_registers)
        right = mgpu.memref_transpose(right, (1, 0, 3, 2))
        total = mgpu.wgmma(total, left, right, swizzle=128)
        nvvm.wgmma_commit_group_sync_aligned()
        _arrive(other, wanted)
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(total.value)

    wanted = lax.convert_element_type(lets_other(group, is_last), jnp.int32)
    return product(left, right, group, wanted)


def lets_other(group: jax.Array, is_last: jax.Array) -> jax.Array:
    """Whether the other warpgroup waits for a product: not for warpgroup 1's last one."""
    return ~is_last | (group == 0)


def _arrive(barrier: ir.Value, wanted: ir.Value) -> None:
    asm = f"""{{
      .reg .pred wanted;
      setp.ne.b32 wanted, $1, 0;
      @wanted bar.arrive $0, {_THREADS};
    }}"""
    llvm.inline_asm(None, [barrier, wanted], asm, "r,r,~{memory}", has_side_effects=True)
