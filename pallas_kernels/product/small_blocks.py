"""Products of few rows with FP8 whose scales are of 32 x 32, on Hopper: what a consumer adds.

An instruction of the FP8 tensor core spans 32 inputs, as a scale does, so each has sums of its own:

    f32[64, rows] = tile[:, 32 inputs] x[:, the same]^T          for each of a group's four
    accumulator  += that times the scale of these 32 x 32 codes, and that of x for the group

A warp has 16 of the outputs, all of one scale, and the scales of its four blocks are a word in
memory. They are powers of two, so that scaling is exact. Products of one or two blocks run while
those of the blocks before are added.

Sums of the FP8 tensor core keep some 14 bits below their largest term, over 32 inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import SMALL_BLOCK
from pallas_kernels.product import wgmma
from pallas_kernels.product.tiling import GROUP_K, WARPGROUP_N
from pallas_kernels.product.work import Work

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA
_OUTPUTS = _LAYOUT.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_BLOCKS = GROUP_K // SMALL_BLOCK
"""Scales of a group of inputs; a byte each, so that a word has all."""
_SUMS_AT_ONCE = 16
"""Rows of x of all products of a part: a thread has half as many registers of sums, and that for
two parts."""


class _Part(NamedTuple):
    """Blocks of a stage that are multiplied as one: their sums are apart, their scales of x one.

    Attributes:
      group: of the stage.
      term: of x.
      row_slice: number of the slice of rows.
      blocks: of the group's four.
    """

    group: int
    term: int
    row_slice: int
    blocks: range


def load_scales(work: Work, k_iter: int | jax.Array) -> list[jax.Array]:
    """The consumer's scales of each group of a k_iter; to be asked for a k_iter ahead.

    Returns:
      i32[64] for each group, four UE8M0 codes each, those of the first 32 inputs lowest.
    """
    return [_load_words(work, work.group_of(k_iter, g)) for g in range(work.groups_of_stage)]


def add_stage(
    work: Work, k_iter: jax.Array, accumulators: Sequence[jax.Array], words: Sequence[jax.Array]
) -> list[jax.Array]:
    """Adds a stage to f32[64, rows] of each slice of rows; `words` are `load_scales` of it."""
    accumulators = list(accumulators)
    parts = _parts_of(work, len(words))
    running, ended, row_scale = _begin(work, k_iter, parts[0]), [], None
    for part, following in itertools.zip_longest(parts, parts[1:]):
        # The next part runs while this one is added, in the registers of the one before, which is
        # added by now. The last one ends in the k_iter in which it began.
        begun = [] if following is None else _begin(work, k_iter, following, ended)
        ended = wgmma.finish(running, in_flight=1 if begun else 0)
        if part.blocks.start == 0:
            row_scale = _load_row_scale(work, k_iter, part)
        assert row_scale is not None
        added = _add(accumulators[part.row_slice], part, ended, words[part.group], row_scale)
        accumulators[part.row_slice] = added
        running = begun
    return accumulators


def _parts_of(work: Work, num_groups: int) -> list[_Part]:
    """All of a stage, group by group."""
    slices = work.tiling.row_slices
    at_once = min(_BLOCKS, max(1, _SUMS_AT_ONCE // slices[0][1]))
    return [
        _Part(group, term, row_slice, range(block, block + at_once))
        for group in range(num_groups)
        for term in range(work.shapes.num_terms)
        for row_slice in range(len(slices))
        for block in range(0, _BLOCKS, at_once)
    ]


def _begin(
    work: Work, k_iter: jax.Array, part: _Part, over: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Begins the products of a part, in the registers of `over`, an earlier part's."""
    left = work.codes_of(work.stage_of(k_iter), work.warpgroup, part.group)  # e4m3[64, 128]
    right = work.rows_of(k_iter, part.group, part.term)  # e4m3[tile_m, 128]
    slices = work.tiling.row_slices
    if len(slices) > 1:
        right = right.at[pl.ds(*slices[part.row_slice])]
    return wgmma.begin_steps(left, right, part.blocks, over)


def _add(
    accumulator: jax.Array,
    part: _Part,
    products: Sequence[jax.Array],
    words: jax.Array,
    row_scale: jax.Array,
) -> jax.Array:
    """Adds the products of a part to f32[64, rows].

    Args:
      accumulator: f32[64, rows].
      part: which blocks they are of.
      products: f32[64, rows] for each of its blocks.
      words: i32[64], scales of its group's blocks, see `load_scales`.
      row_scale: f32[rows], scales of x.
    """
    for block, sums in zip(part.blocks, products, strict=True):
        scale = ((words >> 8 * block) & 0xFF) << 23  # UE8M0's byte is an f32's exponent
        scale = lax.bitcast_convert_type(scale, jnp.float32)
        factor = lax.broadcast_in_dim(scale, sums.shape, [0])
        factor = factor * lax.broadcast_in_dim(row_scale, sums.shape, [1])  # f32[64, rows]
        accumulator = accumulator + sums * factor
    return wgmma.settle(accumulator)


def _load_row_scale(work: Work, k_iter: jax.Array, part: _Part) -> jax.Array:
    """f32[rows], the scales of a part's rows; a thread has those of the columns that it has."""
    first, width = work.tiling.row_slices[part.row_slice]
    return plgpu.load(
        work.row_scales(k_iter, part.group, part.term, first, width),
        layout=_LAYOUT.reduce(0),
        optimized=False,
    )


def _load_words(work: Work, group: jax.Array) -> jax.Array:
    """i32[64], the scales of the consumer's outputs in a group of inputs, of whichever weight."""
    # Asked for a k_iter ahead: behind the last group it is that one's again, and not used.
    group = jnp.minimum(group, work.shapes.k_groups - 1)
    tiles = work.tiles_of_weights(work.warpgroup)
    owns = [jnp.asarray(own).astype(jnp.int32) for own, _ in tiles]
    first_rows = [tile * (WARPGROUP_N // SMALL_BLOCK) for _, tile in tiles]
    scales = list(work.inputs.scales)
    if interpreting():
        return _interpret(scales, owns, first_rows, work.tile.weight, group)
    num_weights = len(scales)
    kind = plgpu.ShapeDtypeStruct((WARPGROUP_N,), jnp.int32, layout=_OUTPUTS)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * num_weights, [_SCALAR] * (2 * num_weights + 2)),
        return_type=kind,
    )
    def load(_, scales, numbers):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        byte, layout = ir.IntegerType.get_signless(8), _OUTPUTS.to_mgpu()
        *of_weights, weight, group = (number.registers.flat[0] for number in numbers)
        owns, first_rows = of_weights[:num_weights], of_weights[num_weights:]
        # The 16 outputs of a warp are of one block: that of a thread's first one is all of theirs.
        [(output,), *_] = layout.thread_idxs((WARPGROUP_N,))
        block = arith.divui(arith.index_cast(i32, output), mgpu.c(SMALL_BLOCK, i32))
        address = None
        for ref, own, first_row in zip(scales, owns, first_rows, strict=True):
            _, rows, columns = ir.MemRefType(ref.type).shape
            row = arith.addi(arith.muli(weight, mgpu.c(rows, i32)), arith.addi(first_row, block))
            column = arith.muli(group, mgpu.c(_BLOCKS, i32))
            offset = arith.addi(
                arith.muli(arith.extui(i64, row), mgpu.c(columns, i64)), arith.extui(i64, column)
            )
            base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(ref))
            at = mgpu.utils.getelementptr(base, [offset], byte)
            is_its = arith.cmpi(arith.CmpIPredicate.ne, own, mgpu.c(0, i32))
            address = at if address is None else arith.select(is_its, at, address)
        # Whole words: a row has a multiple of four scales.
        word = vector.broadcast(ir.VectorType.get((1,), i32), llvm.load(i32, address))
        registers = np.empty(layout.registers_shape((WARPGROUP_N,)), dtype=object)
        registers.flat[:] = [word] * registers.size
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(scales, [*owns, *first_rows, work.tile.weight, group])


def _interpret(
    scales: list[Any],
    owns: list[jax.Array],
    first_rows: list[jax.Array],
    weight: jax.Array,
    group: jax.Array,
) -> jax.Array:
    found: Any = 0
    for ref, own, first_row in zip(scales, owns, first_rows, strict=True):
        codes = ref[weight, pl.ds(first_row, 2), pl.ds(group * _BLOCKS, _BLOCKS)].astype(jnp.int32)
        words = sum(codes[:, block] << 8 * block for block in range(_BLOCKS))
        found = jnp.where(own != 0, jnp.repeat(words, SMALL_BLOCK), found)
    return found
