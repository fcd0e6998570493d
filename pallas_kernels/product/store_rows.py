"""A product's rows as rows of device memory, in 16 bytes at a time where results have 16 bits.

A lane holds two neighbouring results of each eight. Four lanes hold a row of them, and exchange
theirs so that each has all eight of one: four such stores fill two sectors of a row.

Source: PTX ISA 9.0, section 9.7.15.5.2, accumulators of wgmma; shfl.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.backend import interpreting
from pallas_kernels.product.store_transposed import Place, address_of

Ref = Any
plgpu: Any = mosaic_gpu
_SCALAR = plgpu.Layout.WG_SPLAT(())
_LANES = 4
"""That hold a row of eight results."""


def store_rows(target: Ref, values: jax.Array, place: Place) -> None:
    """Stores values[m, n] at target[first_row + m, first_column + n], as many rows as there are.

    Args:
      target: [R, C] in device memory, of 16 or 32 bits; C a multiple of 64.
      values: [64, 64] of its dtype, in WGMMA layout.
      place: where.
    """
    if interpreting():
        for m in range(values.shape[0]):

            @pl.when(m < place.num_rows)
            def _(m: int = m) -> None:
                columns = pl.ds(place.first_column, values.shape[1])
                target[place.first_row + m, columns] = values[m]

        return
    size, width = values.dtype.itemsize, target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, _SCALAR, _SCALAR, _SCALAR))
    def write(_, target, values, first_row, num_rows, first_column):
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        first_row, num_rows, first_column = (
            number.registers.flat[0] for number in (first_row, num_rows, first_column)
        )
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        lane = arith.remui(thread, mgpu.c(_LANES, i32))
        warp = arith.divui(thread, mgpu.c(32, i32))
        # Layout of products: a warp has 16 rows, lane 4 r + q of it rows r and r + 8, and of each
        # eight columns the pair 2 q, 2 q + 1.
        row = arith.remui(arith.divui(thread, mgpu.c(_LANES, i32)), mgpu.c(8, i32))
        row = arith.addi(row, arith.muli(warp, mgpu.c(16, i32)))
        # With 16 bits lane q stores the q-th eight columns of each 32, as `_exchange` gives them to
        # it.
        column = arith.muli(lane, mgpu.c(8 if size == 2 else 2, i32))
        index = arith.addi(first_row, row), arith.addi(first_column, column)
        base = address_of(target, *index, size)
        # Registers go by eight columns, then by the two rows of a thread, eight apart.
        registers = values.registers.reshape(-1, 2)
        for half in range(2):
            present = arith.cmpi(
                arith.CmpIPredicate.sgt, num_rows, arith.addi(row, mgpu.c(8 * half, i32))
            )
            stores = [_words(register, size) for register in registers[:, half]]
            if size == 2:  # four words of 32 columns: a lane's become those of eight columns
                fours = np.array(stores, dtype=object).reshape(-1, _LANES)
                stores = [_exchange(list(four), lane) for four in fours]
            for i, words in enumerate(stores):
                inside = (8 * half * width + i * (8 * _LANES if size == 2 else 8)) * size
                _store(mgpu.utils.getelementptr(base, [inside], byte), words, present)

    write(target, values, *place)


def _words(register: ir.Value, size: int) -> list[ir.Value]:
    """Two neighbouring results as 32-bit words."""
    i32 = ir.IntegerType.get_signless(32)
    if size == 2:
        return [mgpu.utils.bitcast(register, i32)]
    return [mgpu.utils.bitcast(vector.extract(register, [], [i]), i32) for i in range(2)]


def _exchange(words: list[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """Word i of lane j becomes word j of lane i, among four lanes."""
    i32 = ir.IntegerType.get_signless(32)
    # A transposition of 4 x 4 words in two rounds: lanes one apart swap words one apart, then lanes
    # two apart swap words two apart. Each lane sends the word that it does not keep.
    for bit in (1, 2):
        upper = arith.cmpi(
            arith.CmpIPredicate.ne, arith.andi(lane, mgpu.c(bit, i32)), mgpu.c(0, i32)
        )
        exchanged = list(words)
        for i in range(_LANES):
            if i & bit:
                continue
            low, high = words[i], words[i | bit]
            came = mgpu.utils.shfl_bfly(arith.select(upper, low, high), bit)
            exchanged[i] = arith.select(upper, came, low)
            exchanged[i | bit] = arith.select(upper, high, came)
        words = exchanged
    return words


def _store(address: ir.Value, words: list[ir.Value], present: ir.Value) -> None:
    count = len(words)
    names = ", ".join(f"${i + 2}" for i in range(count))
    asm = f"""{{
      .reg .pred present;
      setp.ne.b32 present, $1, 0;
      @present st.global.v{count}.b32 [$0], {{{names}}};
    }}"""
    present = arith.extui(ir.IntegerType.get_signless(32), present)
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [address, present, *words],
        asm,
        ",".join(["l", "r", *["r"] * count]),
        has_side_effects=True,
    )
