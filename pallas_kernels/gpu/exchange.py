"""What a thread of one warpgroup leaves in shared memory for the same thread of another."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu.mosaic import plgpu

Ref = Any


def store(target: Ref, values: jax.Array) -> None:
    """Leaves f32[M, N] in `WGMMA` layout for the same thread of another warpgroup.

    Args:
      target: f32[M * N] in shared memory, in an order that only `load` knows.
      values: what to leave.
    """
    if interpreting():
        target[...] = values.reshape(-1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def write(_, target, values):
        for register, address in zip(
            values.registers.flat, _own_pairs(target, values.registers.size), strict=True
        ):
            llvm.store(register, address, alignment=8)

    write(target, values)


def load(source: Ref, shape: tuple[int, int]) -> jax.Array:
    """f32[M, N] in `WGMMA` layout, as `store` left it."""
    if interpreting():
        return source[...].reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def read(_, source):
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        for place, address in zip(
            np.ndindex(registers.shape), _own_pairs(source, registers.size), strict=True
        ):
            registers[place] = llvm.load(pair, address, alignment=8)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(source)


def _own_pairs(memory: ir.Value, count: int) -> list[ir.Value]:
    """Addresses of a thread's pairs of f32 in shared memory; a warpgroup's lie side by side."""
    i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    base = llvm.addrspacecast(llvm.PointerType.get(3), mgpu.utils.memref_ptr(memory))
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
    first = mgpu.utils.getelementptr(base, [arith.muli(thread, mgpu.c(8, i32))], byte)
    return [mgpu.utils.getelementptr(first, [1024 * i], byte) for i in range(count)]
