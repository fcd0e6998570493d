"""A product's columns as rows of device memory, stored by the threads that hold them.

Eight neighbouring rows of a product lie in eight lanes of a warp, so that a store of f32 fills a
sector of 32 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import left_operand

Ref = Any
plgpu: Any = mosaic_gpu
_TILE = 64
_SCALAR = plgpu.Layout.WG_SPLAT(())


class Place(NamedTuple):
    """Where values[m, n] of a product are stored: at target[first_row + n, first_column + m].

    Attributes:
      first_row: i32[].
      num_rows: i32[], rows that are stored, the first ones; none where it is negative.
      first_column: i32[].
    """

    first_row: jax.Array
    num_rows: jax.Array
    first_column: jax.Array


def store_transposed(
    target: Ref,
    values: jax.Array,
    place: Place,
    *,
    operand_order: bool,
    num_columns: int | None = None,
    layout: Any = plgpu.Layout.WGMMA,
) -> None:
    """Stores a product's columns as rows.

    Args:
      target: [R, C] in device memory, of 16 or 32 bits; columns beyond C are dropped.
      values: [M, N] of its dtype.
      place: where.
      operand_order: whether each 64 rows of `values` are in the order of `left_operand.from_rows`.
      num_columns: rows of `values` that are stored, the first ones, a multiple of 64; None is M.
      layout: that of `values`.
    """
    height = num_columns or values.shape[0]
    if interpreting():
        values = _in_order(values) if operand_order else values
        _interpret(target, values, place, height)
        return
    size = values.dtype.itemsize
    # Only then does the last tile reach beyond the target's columns, and each store has to ask.
    is_ragged = target.shape[1] % height != 0

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, _SCALAR, _SCALAR, _SCALAR))
    def write(_, target, values, first_row, num_rows, first_column):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        byte = ir.IntegerType.get_signless(8)
        width = ir.MemRefType(target.type).shape[1]
        base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(target))
        first_row, num_rows, first_column = (
            number.registers.flat[0] for number in (first_row, num_rows, first_column)
        )
        kind = ir.IntegerType.get_signless(8 * size)
        places = values.layout.thread_idxs(values.shape)
        # A thread's values of one register are neighbours along N, which are different rows of the
        # target: they are stored one by one, and neighbouring lanes fill a sector.
        for register, (row, column) in zip(values.registers.flat, places, strict=True):
            row, column = arith.index_cast(i32, row), arith.index_cast(i32, column)
            if operand_order:  # rows are outputs in the operand's order: back to the weight's own
                row = _loaded_row(row, values.shape[0])
            to_column = arith.addi(first_column, row)  # rows of a product are columns of the result
            for i in range(ir.VectorType(register.type).shape[0]):
                n = arith.addi(column, mgpu.c(i, i32))
                present = arith.cmpi(arith.CmpIPredicate.slt, n, num_rows)
                if is_ragged:
                    inside = arith.cmpi(arith.CmpIPredicate.slt, to_column, mgpu.c(width, i32))
                    present = arith.andi(present, inside)
                if height < values.shape[0]:
                    is_stored = arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.c(height, i32))
                    present = arith.andi(present, is_stored)
                # In 64 bits: a result may be larger than 2^31 bytes.
                to_row = arith.extsi(i64, arith.addi(first_row, n))
                offset = arith.muli(to_row, mgpu.c(width, i64))
                offset = arith.addi(offset, arith.extsi(i64, to_column))
                offset = arith.muli(offset, mgpu.c(size, i64))
                address = mgpu.utils.getelementptr(base, [offset], byte)
                value = mgpu.utils.bitcast(vector.extract(register, [], [i]), kind)
                # Predicated, so that a warp whose rows end within it does not branch.
                asm = f"""{{
                  .reg .pred present;
                  setp.ne.b32 present, $2, 0;
                  @present st.global.b{8 * size} [$0], $1;
                }}"""
                letter = "h" if size == 2 else "r"
                operands = [address, value, arith.extui(i32, present)]
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    operands,
                    asm,
                    f"l,{letter},r",
                    has_side_effects=True,
                )

    write(target, values, *place)


def address_of(target: ir.Value, row: ir.Value, column: ir.Value, size: int) -> ir.Value:
    """Where an element of a matrix [R, C] in device memory lies, its i32 row and column given."""
    i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
    width = ir.MemRefType(target.type).shape[1]
    offset = arith.muli(arith.extsi(i64, row), mgpu.c(width, i64))
    offset = arith.addi(offset, arith.extsi(i64, column))
    offset = arith.muli(offset, mgpu.c(size, i64))
    base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(target))
    return mgpu.utils.getelementptr(base, [offset], byte)


def _loaded_row(row: ir.Value, height: int) -> ir.Value:
    """16 w + 8 h + r -> 32 h + 8 w + r, in each 64 rows."""
    i32 = ir.IntegerType.get_signless(32)

    def bits(value: ir.Value, shift: int, mask: int, to: int) -> ir.Value:
        value = arith.andi(arith.shrui(value, mgpu.c(shift, i32)), mgpu.c(mask, i32))
        return arith.shli(value, mgpu.c(to, i32))

    inside = arith.ori(arith.ori(bits(row, 0, 7, 0), bits(row, 3, 1, 5)), bits(row, 4, 3, 3))
    return inside if height == _TILE else arith.ori(inside, bits(row, 6, 1, 6))


def _in_order(values: jax.Array) -> jax.Array:
    """Each 64 rows as they were before `left_operand.from_rows`."""
    tiles = values.reshape(-1, _TILE, values.shape[1])  # [tiles, 64, N]
    of_tile = jax.vmap(left_operand.to_rows, in_axes=1, out_axes=1)
    return jax.vmap(of_tile)(tiles).reshape(values.shape)


def _interpret(target: Ref, values: jax.Array, place: Place, height: int) -> None:
    (first_row, num_rows, first_column), width = place, values.shape[1]
    rest = target.shape[1] % height
    is_last = first_column + height > target.shape[1]
    for n in range(width):
        for count, is_this in ((height, ~is_last), (rest, is_last)):

            @pl.when((n < num_rows) & is_this)
            def _(n: int = n, count: int = count) -> None:
                target[first_row + n, pl.ds(first_column, count)] = values[:count, n]
