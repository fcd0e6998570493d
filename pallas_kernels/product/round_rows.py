"""Rows of x rounded to E4M3 by the CTA that multiplies them, while its weights are on their way.

A CTA's two consumers take groups of 128 inputs in turns, four rows at a time, a warp a row; of one
or two rows, as long as no norm comes first, four or two groups at a time:

    load      bf16, or f32 sums over splits that are added here; either by token or in runs, too
    norm      where that was left to this kernel; the mean is over all groups, in both consumers
    round     to E4M3 with a scale; unrounded rows in two terms, as in `common/rows.py`
    store     codes in the order in which the tensor core takes them, and scales

Each CTA of a call rounds what it reads, so this is for few rows: `triton_rows` rounds more of them
once for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import numbers, rows
from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import INPUTS
from pallas_kernels.gpu import e4m3, left_operand, mosaic
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.work import Work

Ref = Any
plgpu: Any = mosaic_gpu
_LAYOUT = mosaic.LINES
_SCALAR = plgpu.Layout.WG_SPLAT(())
_UNIT = 4
"""Groups of inputs that a warpgroup takes at once, a warp each: of four rows, or of fewer."""
_AHEAD = 12
"""Units whose loads are on their way at once."""


def await_rows(work: Work) -> None:
    """Rounds the rows of x where the kernel does that, and waits until all are there."""
    if not work.shapes.rounds_rows:
        return
    assert isinstance(work.inputs.rows, RawRows)
    round_rows(work, work.inputs.rows)
    # Each consumer has written some groups, which both multiply: stores become visible to the
    # tensor core, then each waits for the other.
    plgpu.commit_smem()
    plgpu.barrier_arrive(work.scratch.rows_full)
    plgpu.barrier_wait(work.scratch.rows_full)  # for the other consumer's groups


def round_rows(work: Work, source: RawRows) -> None:
    """Fills `rows_smem` and `scales_smem` of a CTA, as one of its consumers.

    Rows come four at a time where tiles may have fewer than the most, as those of experts do.
    """
    k_groups = work.k_iters * work.groups_of_stage
    groups = _groups_of_unit(work, source, k_groups)
    first_rows = range(0, work.most_rows, _UNIT // groups)
    # Even items have few rows in the last tile of a run alone: loading without a branch for each
    # four rows lets all loads be on their way together.
    if work.inputs.items is None:
        _round_units(work, source, first_rows, groups, k_groups)
        return
    for first_row in first_rows:
        some = functools.partial(_round_units, work, source, (first_row,), groups, k_groups)
        pl.when(first_row < work.tile.num_rows)(some)


def _groups_of_unit(work: Work, source: RawRows, k_groups: int) -> int:
    """Groups of a row's inputs that four warps take: four, of two rows two, of more one of each."""
    if source.norm is not None:
        return 1
    groups = _UNIT // min(_UNIT, pl.next_power_of_2(work.most_rows))
    return groups if k_groups % groups == 0 else 1


def _inverse_rms(work: Work, source: RawRows, first_row: int) -> jax.Array:
    """f32[4], of the four rows from `first_row` on."""
    squares: Any = 0
    # Each consumer goes through all groups, and not through its own half: nothing is exchanged for
    # a sum of squares, and a row's bytes are in L2 by then.
    for start in range(0, work.shapes.k_groups, _AHEAD):
        groups = range(start, min(start + _AHEAD, work.shapes.k_groups))
        for x in [_load(work, source, first_row, jnp.int32(group * INPUTS)) for group in groups]:
            squares += x * x  # f32[4, 128]; the lanes of a row are added once, at the end
    return lax.rsqrt(jnp.sum(squares, axis=1) / source.num_inputs + source.eps)


def _norm(weight: Ref, scale: jax.Array, x: jax.Array, column: jax.Array) -> jax.Array:
    """f32[4, 128], columns of rows, normed and rounded to bf16."""
    # Loaded by column, each lane's own four, then spread over the rows of `LINES`.
    weight = plgpu.load(
        weight.at[pl.ds(column, INPUTS)], layout=_LAYOUT.reduce(0), optimized=False
    ).astype(jnp.float32)
    # A lane has the weights of its own columns, and all lanes of a warp the scale of its row:
    # neither cast moves a value.
    weight = plgpu.layout_cast(lax.broadcast_in_dim(weight, x.shape, [1]), _LAYOUT)
    scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, x.shape, [0]), _LAYOUT)
    return (x * scale * weight).astype(jnp.bfloat16).astype(jnp.float32)


def _round_units(
    work: Work, source: RawRows, first_rows: Sequence[int], groups: int, k_groups: int
) -> None:
    """All groups of inputs of a consumer, of the rows from each of `first_rows` on.

    Many are a loop: the compiler loads what is unrolled at once, into registers that leave an SM
    room for one CTA instead of two.
    """
    norms: dict[int, Callable[[jax.Array, jax.Array], jax.Array]] = {}
    if source.norm is not None:
        scales = {first_row: _inverse_rms(work, source, first_row) for first_row in first_rows}
        norms = {
            first_row: functools.partial(_norm, source.norm, scales[first_row])
            for first_row in first_rows
        }
    units = pl.cdiv(k_groups, 2 * groups)
    rounds = pl.cdiv(units * len(first_rows), _AHEAD)
    at_once = pl.cdiv(units, rounds)
    # Else the last units lie beyond the row: they load its last groups again, and store nothing.
    is_whole = units % at_once == 0 and k_groups % (2 * groups) == 0

    def round_some(step: int | jax.Array, _: None = None) -> None:
        unit_groups = [(2 * (step * at_once + i) + work.warpgroup) * groups for i in range(at_once)]
        loaded = []  # all loads first, so that they are on their way together
        for group, first_row in itertools.product(unit_groups, first_rows):
            inside = group if is_whole else jnp.minimum(group, k_groups - groups)
            # Counted from the first input of the CTA's split, whose groups alone `rows_smem` holds.
            column = (work.group_of(0) + inside) * INPUTS
            x = _load(work, source, first_row, column, groups)
            loaded.append((group, first_row, column, x))
        for group, first_row, column, x in loaded:
            x = norms[first_row](x, column) if norms else x
            terms = _split(x, work.shapes.num_terms)
            store = functools.partial(_store, work, terms, group, groups, first_row)
            store() if is_whole else pl.when(group < k_groups)(store)

    if rounds == 1:
        round_some(0)
    else:
        lax.fori_loop(0, rounds, round_some, None)


def _split(x: jax.Array, num_terms: int) -> list[tuple[jax.Array, jax.Array]]:
    """f32[4, 128] -> codes e4m3[4, 128] and scales f32[4] of each term."""
    terms = []
    exponent = numbers.ue8m0_exponent(rows.group_maximum(x) * numbers.INV_448)
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    # The inverse is a power of two, so that the product is exact.
    scaled = x * plgpu.layout_cast(lax.broadcast_in_dim(inverse, x.shape, [0]), _LAYOUT)
    for term in range(num_terms):
        codes = e4m3.encode(scaled)
        terms.append((codes, lax.bitcast_convert_type(exponent << 23, jnp.float32)))
        if term + 1 < num_terms:
            scaled = (scaled - e4m3.decode(codes)) * np.float32(rows.REST)
            exponent = exponent - rows.REST_BITS
    return terms


def _store(
    work: Work,
    terms: list[tuple[jax.Array, jax.Array]],
    group: Any,
    groups: int,
    first_row: int,
) -> None:
    # A thread of `LINES` holds neighbouring columns of a row, and stores each word of four codes
    # where the tensor core looks for it: swizzled, and in the order of MXFP4's codes as unpacked.
    order = mosaic.WIDE_ROWS if work.shapes.is_mxfp4 else None
    some = group if groups == 1 else pl.ds(group, groups)
    rows = pl.ds(first_row, _UNIT // groups)
    for term, (codes, scale) in enumerate(terms):
        # This consumer's until `rows_full`: the other one writes other groups.
        target = work.scratch.rows_smem.at[some, term]
        left_operand.store_columns(target, codes, order, first_row=first_row)
        _store_scales(work.scratch.scales_smem.at[pl.ds(group, groups), term, rows], scale)


def _store_scales(target: Ref, scale: jax.Array) -> None:
    """f32[4] of a row's groups, then the next row's, into f32[groups, rows] in shared memory."""
    if interpreting():
        groups, rows = target.shape
        target[...] = scale.reshape(rows, groups).T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _LAYOUT.reduce(1)))
    def store(_, target, scale):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        kind = ir.MemRefType(target.type)
        groups, _ = kind.shape
        apart = mgpu.c(kind.get_strides_and_offset()[0][0], i32)
        [register], [(line,)] = scale.registers.flat, scale.layout.thread_idxs(scale.shape)
        # A line's scale is in all lanes of its warp, which store the same word at the same address.
        line = arith.index_cast(i32, line)
        row, group = (op(line, mgpu.c(groups, i32)) for op in (arith.divui, arith.remui))
        offset = arith.addi(arith.muli(group, apart), row)
        base = llvm.addrspacecast(llvm.PointerType.get(3), mgpu.utils.memref_ptr(target))
        value = vector.extract(register, [], [0])
        llvm.store(value, mgpu.utils.getelementptr(base, [offset], f32))

    store(target, scale)


def _load(
    work: Work, source: RawRows, first_row: int, column: jax.Array, groups: int = 1
) -> jax.Array:
    """f32[4, 128], rounded to bf16: groups of each of the rows from `first_row` on.

    The last row is repeated. Groups of a row follow each other.
    """
    if interpreting():
        return _interpret(work, source, first_row, column, groups)
    values, token = source.values, source.token
    refs = [values] if token is None else [values, token]
    result = plgpu.ShapeDtypeStruct((_UNIT, INPUTS), jnp.float32, layout=_LAYOUT)

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *[_SCALAR] * 3), return_type=result
    )
    def load(_, values, *rest):
        *token, first, num_rows, column = rest
        first, num_rows, column = (n.registers.flat[0] for n in (first, num_rows, column))
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        byte, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
        kind = ir.MemRefType(values.type)
        splits, count, dim = kind.shape
        size = 4 if kind.element_type == f32 else 2

        # Offsets have 64 bits: sums of many splits may lie beyond 2^31 bytes.
        def at(ref, offset, size):
            base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(ref))
            offset = arith.muli(offset, mgpu.c(size, i64))
            return mgpu.utils.getelementptr(base, [offset], byte)

        def divided(x, count):
            count = mgpu.c(count, i32)
            return arith.divui(x, count), arith.remui(x, count)

        layout = _LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape((_UNIT, INPUTS)), dtype=object)
        loaded = ir.VectorType.get((layout.vector_length,), kind.element_type)
        wide = ir.VectorType.get((layout.vector_length,), f32)
        narrow = ir.VectorType.get((layout.vector_length,), ir.BF16Type.get())
        flat = registers.reshape(-1)
        # `LINES`: a warp has a line of 128, which is a row, or one of several groups of a row.
        for number, (row, inner) in enumerate(layout.thread_idxs((_UNIT, INPUTS))):
            line, inner = arith.index_cast(i32, row), arith.index_cast(i32, inner)
            group = arith.remui(line, mgpu.c(groups, i32))
            inner = arith.addi(inner, arith.muli(group, mgpu.c(INPUTS, i32)))
            row = arith.addi(arith.divui(line, mgpu.c(groups, i32)), mgpu.c(first_row, i32))
            # Beyond the last row that one again: what is multiplied with it is not stored.
            row = arith.minsi(row, arith.subi(num_rows, mgpu.c(1, i32)))
            row = arith.addi(first, row)
            if source.interleaved > 1:  # numbered weight by weight, and lying token by token
                weight, row = divided(row, count // source.interleaved)
                row = arith.addi(arith.muli(row, mgpu.c(source.interleaved, i32)), weight)
            inner = arith.addi(column, inner)
            if source.column_runs > 1:  # a row's columns lie in as many runs
                run, inner = divided(inner, dim)
                of_run = mgpu.c(count // source.column_runs, i32)
                row = arith.addi(arith.muli(run, of_run), row)
            row, inner = arith.extsi(i64, row), arith.extsi(i64, inner)
            if token:
                row = arith.extsi(i64, llvm.load(i32, at(token[0], row, 4)))
                zero, last = mgpu.c(0, i64), mgpu.c(count - 1, i64)
                row = arith.minsi(arith.maxsi(row, zero), last)
            offset = arith.addi(arith.muli(row, mgpu.c(dim, i64)), inner)
            total = None  # of splits of the product before, added in their order
            for split in range(splits):
                start = arith.addi(offset, mgpu.c(split * count * dim, i64))
                part = llvm.load(loaded, at(values, start, size))
                part = part if size == 4 else arith.extf(wide, part)
                total = part if total is None else arith.addf(total, part)
            if size == 4:
                # As the product before would have stored the sum, and back, for the norm and the
                # scales.
                total = arith.extf(wide, arith.truncf(narrow, total))
            flat[number] = total
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(*refs, work.tile.first_row, work.tile.num_rows, column)


def _interpret(
    work: Work, source: RawRows, first_row: int, column: jax.Array, groups: int
) -> jax.Array:
    lines, (_, count, dim) = [], source.values.shape
    for line in range(_UNIT):
        row, group = divmod(line, groups)
        number = work.tile.first_row + jnp.minimum(first_row + row, work.tile.num_rows - 1)
        if source.token is not None:
            number = jnp.clip(source.token[number], 0, count - 1)
        of_weight = count // source.interleaved
        number = number % of_weight * source.interleaved + number // of_weight
        first = column + group * INPUTS
        number = first // dim * (count // source.column_runs) + number
        columns = pl.ds(first % dim, INPUTS)
        parts = source.values[:, number, columns].astype(jnp.float32)
        lines.append(functools.reduce(jnp.add, list(parts)))
    return jnp.stack(lines).astype(jnp.bfloat16).astype(jnp.float32)
