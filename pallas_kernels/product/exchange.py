"""What a thread leaves in shared memory for another of the same place.

`store` and `load` are for the same thread of another warpgroup. `store_upper` and `load_lower` are
for the thread of the same warpgroup whose rows are as many above: in `TCGEN05` layout, two warps
have the lower 64 of 128 rows, and two the upper.
"""

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
Layout = Any
_HALF = 64
"""Threads of half a warpgroup."""


def store(target: Ref, values: jax.Array) -> None:
    """Leaves f32[M, N] in `WGMMA` layout for the same thread of another warpgroup.

    Args:
      target: f32[M * N] in shared memory, in an order that only `load` knows.
      values: what to leave.
    """
    if interpreting():
        target[...] = values.reshape(-1)
        return

    # By thread and register, not by row and column: the reader has the same layout, so that eight
    # bytes of neighbouring threads lie side by side.
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

    return _load(source, shape, plgpu.Layout.WGMMA, 2 * _HALF)


def store_upper(target: Ref, values: jax.Array, layout: Layout) -> None:
    """Leaves the upper half of the rows for the threads that hold the lower half.

    Args:
      target: f32[M // 2 * N] in shared memory, in an order that only `load_lower` knows.
      values: f32[M, N].
      layout: that of `values`, in which half the threads of a warpgroup hold half the rows.
    """
    if interpreting():
        target[...] = values[values.shape[0] // 2 :].reshape(-1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def write(_, target, values):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(2 * _HALF, i32))
        # Threads 64 .. 127 hold the upper rows: thread 64 + i writes where thread i will look.
        addresses = _own_pairs(target, values.registers.size, num_threads=_HALF)
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.uge, thread, mgpu.c(_HALF, i32))):
            for register, address in zip(values.registers.flat, addresses, strict=True):
                llvm.store(register, address, alignment=8)

    write(target, values)


def load_lower(source: Ref, shape: tuple[int, int], layout: Layout) -> jax.Array:
    """f32[M, N] whose lower half is what `store_upper` left; the upper half is arbitrary."""
    if interpreting():
        lower = source[...].reshape(shape[0] // 2, shape[1])
        return jnp.concatenate([lower, lower])
    # All 128 threads load: the upper ones what their lower partners do, which nobody uses.
    return _load(source, shape, layout, _HALF)


def _load(source: Ref, shape: tuple[int, int], layout: Layout, num_threads: int) -> jax.Array:
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def read(_, source):
        tiled = layout.to_mgpu()
        registers = np.empty(tiled.registers_shape(shape), dtype=object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())  # a register's two neighbours
        for index, address in zip(
            np.ndindex(registers.shape),
            _own_pairs(source, registers.size, num_threads=num_threads),
            strict=True,
        ):
            registers[index] = llvm.load(pair, address, alignment=8)
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    return read(source)


def _own_pairs(memory: ir.Value, count: int, num_threads: int = 2 * _HALF) -> list[ir.Value]:
    """Addresses of a thread's pairs of f32 in shared memory; those of threads lie side by side."""
    i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    base = llvm.addrspacecast(llvm.PointerType.get(3), mgpu.utils.memref_ptr(memory))
    # Half a warpgroup or a whole one: writer and reader are the same thread modulo that.
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(num_threads, i32))
    first = mgpu.utils.getelementptr(base, [arith.muli(thread, mgpu.c(8, i32))], byte)
    return [mgpu.utils.getelementptr(first, [8 * num_threads * i], byte) for i in range(count)]
