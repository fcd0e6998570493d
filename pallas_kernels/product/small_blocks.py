"""Products of few rows with FP8 whose scales are of 32 x 32, on Hopper: what a consumer adds.

An instruction of the FP8 tensor core spans 32 inputs, as a scale does, so each has sums of its own:

    f32[64, rows] = tile[:, 32 inputs] x[:, the same]^T          for each of a group's four
    of the group  = sum of these times their scales, of 32 outputs each
    accumulator  += that times the scale of x, which is one for the group

A warp has 16 of the outputs, all of one scale, and the scales of its four blocks are a word in
memory. They are powers of two, so that scaling is exact.

Sums of the FP8 tensor core keep some 14 bits below their largest term, over 32 inputs.
"""

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
_SUMS_AT_ONCE = 32
"""Rows of x of all products that run at once: a thread has half as many registers of sums. Other
warps multiply while one adds."""


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
    accumulators, slices = list(accumulators), work.tiling.row_slices
    products: list[jax.Array] = []
    terms = range(work.shapes.num_terms)
    for g, number, term in itertools.product(range(len(words)), range(len(slices)), terms):
        left = work.codes_of(work.stage_of(k_iter), work.warpgroup, g)  # e4m3[64, 128]
        right, (first, width) = work.rows_of(k_iter, g, term), slices[number]  # e4m3[rows, 128]
        if len(slices) > 1:
            right = right.at[pl.ds(first, width)]
        # Rows of x are columns of a product: a thread loads the scales of the columns that it has.
        row_scale = plgpu.load(
            work.row_scales(k_iter, g, term, first, width),
            layout=_LAYOUT.reduce(0),
            optimized=False,
        )
        total: jax.Array | None = None
        at_once = min(_BLOCKS, max(1, _SUMS_AT_ONCE // width))
        for block in range(0, _BLOCKS, at_once):
            blocks = range(block, block + at_once)
            # The registers of the products before, which are added by now, become those of these.
            products = wgmma.finish(wgmma.begin_steps(left, right, blocks, products))
            for which, sums in zip(blocks, products, strict=True):
                scale = ((words[g] >> 8 * which) & 0xFF) << 23  # UE8M0's byte is an f32's exponent
                scale = lax.bitcast_convert_type(scale, jnp.float32)
                scaled = sums * lax.broadcast_in_dim(scale, sums.shape, [0])  # f32[64, rows]
                total = scaled if total is None else total + scaled
        assert total is not None
        row_scale = lax.broadcast_in_dim(row_scale, total.shape, [1])
        accumulators[number] = wgmma.settle(accumulators[number] + total * row_scale)
    return accumulators


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
