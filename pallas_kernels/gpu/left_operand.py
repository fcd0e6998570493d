"""Keys as the left operand of Hopper's FP8 product, without leaving the registers they came into.

`wgmma` takes its left operand from registers if each thread holds the bytes that its place asks
for. A product's rows may come in any order, and its inner dimension too if both operands agree; so
what a thread has loaded of a key is given the places it must have, and nothing is moved:

    loaded     warp w, lane 4 r + q, rows 32 h + 8 w + r, vectors v, words k of 4 bytes i
    operand    the same thread,      rows 16 w + 8 h + r, bytes 64 v + 16 k + 4 q + i

Source: PTX ISA 9.0, section 9.7.15.5.1, fragments of wgmma.mma_async.m64nNk32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic

plgpu: Any = mosaic_gpu
DIM = 128
_ROWS = (2, 4, 8)
"""Sizes of (h, w, r)."""
Layout = Any
Ref = Any


def order_columns(rows: jax.Array, layout: Layout) -> jax.Array:
    """[M, 128] with the columns in the order of an operand's that was loaded in this layout."""
    if layout == mosaic.EVEN_ROWS:  # bytes 64 v + 16 q + 4 k + i
        # [M, v, q, k, i]; an operand has k before q.
        split = rows.reshape(-1, 2, 4, 4, 4)
    else:  # WIDE_ROWS, bytes 32 q + 16 v + 4 k + i
        split = rows.reshape(-1, 4, 2, 4, 4).swapaxes(-4, -3)
    return split.swapaxes(-3, -2).reshape(rows.shape)


def store_columns(
    target: Ref, rows: jax.Array, layout: Layout | None, *, first_row: int = 0
) -> None:
    """Stores the other operand's rows with their columns in the order of `from_rows`'.

    Args:
      target: e4m3[R, 128] in shared memory, `mosaic.SWIZZLED_BYTES`; or e4m3[G, R, 128], into
        whose G parts the rows go in turns.
      rows: e4m3[M, 128] in `mosaic.LINES` layout.
      layout: layout in which the left operand's rows are loaded, `mosaic.WIDE_ROWS` or `EVEN_ROWS`;
        None leaves the columns in their order.
      first_row: row of the target that the first one becomes.
    """
    groups = target.shape[0] if len(target.shape) == 3 else 1
    if interpreting():
        ordered = rows if layout is None else order_columns(rows, layout)
        if groups > 1:
            ordered = ordered.reshape(-1, groups, DIM).swapaxes(0, 1)
            target[:, pl.ds(first_row, rows.shape[0] // groups)] = ordered
        else:
            target[pl.ds(first_row, rows.shape[0])] = ordered
        return
    shape = rows.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(mosaic.SWIZZLED_BYTES), mosaic.LINES))
    def store(_, target, rows):
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        base = llvm.addrspacecast(llvm.PointerType.get(3), mgpu.utils.memref_ptr(target))
        coordinates = rows.layout.thread_idxs(shape)
        (apart, *_), _ = ir.MemRefType(target.type).get_strides_and_offset()
        for register, coordinate in zip(rows.registers.flat, coordinates, strict=True):
            row, column = (arith.index_cast(i32, i) for i in coordinate)
            group = arith.remui(row, mgpu.c(groups, i32))  # rows go to parts in turns
            row = arith.divui(row, mgpu.c(groups, i32))
            row = arith.addi(row, mgpu.c(first_row, i32))
            v, k, q = _place_of_word(arith.divui(column, mgpu.c(4, i32)), layout)
            # The swizzle of 128 bytes: the 16-byte chunks of a line change places by its row among
            # eight. A warp stores a whole line, each bank once.
            swizzle = arith.remui(row, mgpu.c(8, i32))
            chunk = arith.xori(swizzle, arith.addi(arith.muli(v, mgpu.c(4, i32)), k))
            offset = arith.muli(row, mgpu.c(DIM, i32))
            for number, size in ((chunk, 16), (q, 4), (group, apart)):
                offset = arith.addi(offset, arith.muli(number, mgpu.c(size, i32)))
            address = mgpu.utils.getelementptr(base, [offset], byte)
            llvm.store(mgpu.utils.bitcast(register, i32), address, alignment=4)

    store(target, rows)


def _place_of_word(word: ir.Value, layout: Layout | None) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(v, k, q) of the word of a row that was loaded in this layout; it becomes 16 v + 4 k + q."""
    i32 = ir.IntegerType.get_signless(32)

    def digit(unit: int, count: int) -> ir.Value:
        return arith.remui(arith.divui(word, mgpu.c(unit, i32)), mgpu.c(count, i32))

    if layout is None:
        return digit(16, 2), digit(4, 4), digit(1, 4)
    if layout == mosaic.EVEN_ROWS:  # words 16 v + 4 q + k
        return digit(16, 2), digit(1, 4), digit(4, 4)
    return digit(4, 2), digit(1, 4), digit(8, 4)  # WIDE_ROWS, words 8 q + 4 v + k


def from_rows(keys: jax.Array, layout: Layout) -> jax.Array:
    """e4m3[64, 128] in `mosaic.WIDE_ROWS` or `EVEN_ROWS` -> the same bytes as an operand."""
    if interpreting():
        split = order_columns(keys, layout).reshape(*_ROWS, DIM)
        return split.swapaxes(0, 1).reshape(keys.shape)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(keys.shape, keys.dtype, layout=plgpu.Layout.WGMMA_8BIT),
    )
    def convert(_, keys):
        operand = plgpu.Layout.WGMMA_8BIT.to_mgpu()
        registers = np.empty(operand.registers_shape(keys.shape), dtype=object)
        # The same registers under other numbers: no instruction comes of this.
        loaded = keys.registers.reshape(2, 2)
        flat = registers.reshape(8, 2)
        for h, v, k in np.ndindex(2, 2, 4):
            word = mgpu.utils.vector_slice(loaded[h, v], slice(4 * k, 4 * k + 4))
            flat[4 * v + k, h] = word
        return mgpu.FragmentedArray(_registers=registers, _layout=operand, _is_signed=None)

    return convert(keys)


def to_rows(values: jax.Array) -> jax.Array:
    """f32[64] of an operand's rows -> the keys' order, in `mosaic.ROW` layout."""
    if interpreting():
        _, warps, rows = _ROWS
        return values.reshape(warps, -1, rows).swapaxes(0, 1).reshape(values.shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=mosaic.ROW),
    )
    def convert(_, values):
        layout = mosaic.ROW.to_mgpu()
        # The same registers under other numbers of rows: no value moves.
        registers = values.registers.reshape(layout.registers_shape(values.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return convert(values)


def to_operand(values: jax.Array) -> jax.Array:
    """f32[64] of rows as they were loaded, in `mosaic.ROW` layout -> in the operand's order.

    The inverse of `to_rows`: the layout of a product's rows, `WGMMA.reduce(1)`.
    """
    layout = plgpu.Layout.WGMMA.reduce(1)
    if interpreting():
        heights, warps, rows = _ROWS
        return values.reshape(heights, warps, rows).swapaxes(0, 1).reshape(values.shape)

    @plgpu.inline_mgpu(
        arg_types=(mosaic.ROW,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=layout),
    )
    def convert(_, values):
        tiled = layout.to_mgpu()
        # As in `to_rows`, the other way round: no value moves.
        registers = values.registers.reshape(tiled.registers_shape(values.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    return convert(values)
