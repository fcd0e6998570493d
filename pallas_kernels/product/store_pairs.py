"""A product's columns as rows of device memory, two outputs at a time where they have 16 bits.

As `store_transposed`, with fewer instructions: a warp transposes each 8 x 8 results by `movmatrix`,
so that a lane holds two neighbouring outputs of one row, and a lane's addresses are one base and
constants.

Source: PTX ISA 9.0, movmatrix, and section 9.7.15.5.2, accumulators of wgmma.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.backend import interpreting
from pallas_kernels.product.store_transposed import Place, address_of, store_transposed

Ref = Any
plgpu: Any = mosaic_gpu
_SCALAR = plgpu.Layout.WG_SPLAT(())
_HEIGHT = 64


def store_pairs(target: Ref, values: jax.Array, place: Place, *, operand_order: bool) -> None:
    """See `store_transposed`; of [64, N] in `WGMMA` layout.

    A target whose width is no multiple of 64 is left to `store_transposed`.
    """
    if interpreting() or target.shape[1] % _HEIGHT:
        store_transposed(target, values, place, operand_order=operand_order)
        return
    size, width = values.dtype.itemsize, target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, _SCALAR, _SCALAR, _SCALAR))
    def write(_, target, values, first_row, num_rows, first_column):
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        first_row, num_rows, first_column = (
            number.registers.flat[0] for number in (first_row, num_rows, first_column)
        )
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        warp = arith.divui(thread, mgpu.c(32, i32))
        lane = arith.remui(thread, mgpu.c(32, i32))
        eighth = arith.divui(lane, mgpu.c(4, i32))
        pair = arith.muli(arith.remui(lane, mgpu.c(4, i32)), mgpu.c(2, i32))
        # A lane has two neighbouring columns of one row of a product. `movmatrix` gives it two
        # neighbouring rows of one column, which are two outputs of one row of the result; values of
        # 32 bits stay where they are.
        row, column = (eighth, pair) if size == 2 else (pair, eighth)
        # A warp has twice eight outputs: in `left_operand`'s order they lie 32 apart.
        of_warp, of_half = (8, 32) if operand_order else (16, 8)
        column = arith.addi(column, arith.muli(warp, mgpu.c(of_warp, i32)))
        # How many rows there are from the lane's own on: each store compares its constant with
        # that.
        left = arith.subi(num_rows, row)
        index = arith.addi(first_row, row), arith.addi(first_column, column)
        base = address_of(target, *index, size)
        # By eight columns, then by the two rows of a lane, eight apart.
        registers = values.registers.reshape(-1, 2)
        for eight, half in np.ndindex(registers.shape):
            words = _words(registers[eight, half], size)
            for i, word in enumerate(words):
                n = 8 * eight + i
                offset = (n * width + of_half * half) * size
                present = arith.cmpi(arith.CmpIPredicate.sgt, left, mgpu.c(n, i32))
                _store_word(mgpu.utils.getelementptr(base, [offset], byte), word, present)

    write(target, values, *place)


def _words(register: ir.Value, size: int) -> list[ir.Value]:
    """A lane's 32-bit words of an 8 x 8 tile: of 16 bits two outputs of a row, else one of each."""
    i32 = ir.IntegerType.get_signless(32)
    if size == 4:
        return [mgpu.utils.bitcast(vector.extract(register, [], [i]), i32) for i in range(2)]
    word = mgpu.utils.bitcast(register, i32)
    asm = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return [llvm.inline_asm(i32, [word], asm, "=r,r", has_side_effects=True)]


def _store_word(address: ir.Value, word: ir.Value, present: ir.Value) -> None:
    asm = """{
      .reg .pred present;
      setp.ne.b32 present, $2, 0;
      @present st.global.b32 [$0], $1;
    }"""
    operands = [address, word, arith.extui(ir.IntegerType.get_signless(32), present)]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, asm, "l,r,r", has_side_effects=True)
