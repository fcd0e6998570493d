"""Products of rows with weights on Hopper, weights on the left: what its two consumers do.

Block FP8 with many rows is multiplied in `mosaic_hopper_rows`; a group of inputs whose scales are
of 32 x 32 is added in `small_blocks`.

Consumer g has a tile of 64 outputs, the left operand of a product whose right one is x:

    FP8, dense    the tile as it lies in shared memory
    MXFP4         unpacked to E4M3 in registers
    [64, tile_m] = tile x^T, f32, per group of inputs
    accumulator += product * scale of the tile (FP8) or row (MXFP4) * scale of x

More than 64 rows of x are several such products, slices of the rows, with accumulators of their
own; while one runs, the one before it is added. MXFP4's factor is one for both rows of a thread,
and the next codes are loaded while products run.

With a gate and an up projection, consumer 0 has the gate's tile and consumer 1 the up's.

Sums of the FP8 tensor core keep some 14 bits below their largest term, over 128 inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic
from pallas_kernels.product import exchange, small_blocks, wgmma
from pallas_kernels.product.operands import SwiGLU
from pallas_kernels.product.round_rows import await_rows
from pallas_kernels.product.store_pairs import store_pairs
from pallas_kernels.product.store_transposed import Place, store_transposed
from pallas_kernels.product.tiling import CONSUMERS, WARPGROUP_N
from pallas_kernels.product.work import Work

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA


def mainloop(work: Work) -> list[jax.Array]:
    """Multiplies stage after stage: f32[64, rows] of each slice of the tile's rows."""
    groups = range(work.groups_of_stage)

    def tile_scales_of(k_iter: int | jax.Array) -> list[jax.Array]:
        if not work.shapes.is_fp8:
            return []
        if work.shapes.has_small_blocks:
            return small_blocks.load_scales(work, k_iter)
        return [work.scale_of_tile(work.warpgroup, work.group_of(k_iter, g)) for g in groups]

    def add_stage(
        k_iter: jax.Array, carry: tuple[list[jax.Array], list[jax.Array]]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        accumulators, tile_scales = carry
        stage = work.stage_of(k_iter)
        # From here on the stage is the consumers': all copies into it have arrived.
        plgpu.barrier_wait(work.scratch.full.at[stage])
        next_scales = tile_scales_of(k_iter + 1)  # on their way while this stage is multiplied
        if work.shapes.is_dense:
            accumulators = _add_dense(work, k_iter, accumulators)
        elif work.shapes.has_small_blocks:
            accumulators = small_blocks.add_stage(work, k_iter, accumulators, tile_scales)
        else:
            for g in groups:
                tile_scale = tile_scales[g] if tile_scales else None
                accumulators = _add_group(work, k_iter, g, accumulators, tile_scale)
        _give_back(work, stage)
        return accumulators, next_scales

    zeros = [
        # In the layout of products, which are then added where they come out.
        plgpu.layout_cast(jnp.zeros((WARPGROUP_N, width), jnp.float32), _LAYOUT)
        for _, width in work.tiling.row_slices
    ]
    # Asked for first: they are on their way while rows of x are rounded.
    first_scales = tile_scales_of(0)
    await_rows(work)
    if work.shapes.loads_ahead(work.tiling.tile_m):
        return _add_ahead(work, zeros)
    accumulators, _ = lax.fori_loop(0, work.k_iters, add_stage, (zeros, first_scales))
    return accumulators


def epilogue(
    work: Work, accumulators: list[jax.Array], outputs: list[Any], swiglu: SwiGLU | None
) -> None:
    """Stores the outputs, after SwiGLU where that follows."""
    store = functools.partial(_store, work, outputs)
    if swiglu is not None:
        accumulators = [a.astype(swiglu.dtype).astype(jnp.float32) for a in accumulators]
        _activate(work, accumulators, swiglu, store)
        return

    # An odd number of tiles leaves the last CTA's second consumer none, and its products unused.
    @pl.when(work.tile.n_index * CONSUMERS + work.warpgroup <= work.last_warpgroup_tile)
    def _():
        for (first, _), accumulator in zip(work.tiling.row_slices, accumulators, strict=True):
            store(accumulator, first)


def _give_back(work: Work, stage: jax.Array) -> None:
    """Leaves a stage to the producer, which fills it again once both consumers are here.

    Nothing is in flight that reads it: products have ended, and loads of scales with them.
    """
    if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
        plgpu.commit_smem()
    plgpu.barrier_arrive(work.scratch.empty.at[stage])


class _Operand(NamedTuple):
    """A tile as the left operand: MXFP4 in registers, with a factor f32[64] of its rows."""

    left: Any
    factor: jax.Array | None = None


def _add_ahead(work: Work, accumulators: list[jax.Array]) -> list[jax.Array]:
    """Adds stages of MXFP4, a group of inputs each, and loads the next codes while products run."""
    assert work.groups_of_stage == 1

    def take(k_iter: jax.Array) -> _Operand:
        stage = work.stage_of(k_iter)
        plgpu.barrier_wait(work.scratch.full.at[stage])  # the stage is the consumers'
        return _Operand(*work.unpack(stage, 0))  # e4m3[64, 128], f32[64], in registers

    def add_stage(
        k_iter: jax.Array, carry: tuple[list[jax.Array], _Operand]
    ) -> tuple[list[jax.Array], _Operand]:
        accumulators, operand = carry
        following: list[_Operand] = []
        accumulators = _add_group(
            work, k_iter, 0, accumulators, None, operand, lambda: following.append(take(k_iter + 1))
        )
        _give_back(work, work.stage_of(k_iter))
        return accumulators, following[0]

    last = jnp.int32(work.k_iters - 1)
    start = accumulators, take(jnp.int32(0))
    accumulators, operand = lax.fori_loop(0, last, add_stage, start)
    accumulators = _add_group(work, last, 0, accumulators, None, operand)  # nothing to load ahead
    _give_back(work, work.stage_of(last))
    return accumulators


def _add_dense(work: Work, k_iter: jax.Array, accumulators: list[jax.Array]) -> list[jax.Array]:
    """Adds a stage of dense weights."""
    stage, groups = work.stage_of(k_iter), range(work.groups_of_stage)
    added = []
    for accumulator, rows in zip(accumulators, work.tiling.row_slices, strict=True):
        pairs = [
            (
                work.codes_of(stage, work.warpgroup, g),  # bf16[64, 64]
                _rows_of(work, k_iter, g, 0, rows).transpose((1, 0)),  # bf16[64, rows], a view
            )
            for g in groups
        ]
        added.append(accumulator + mosaic.multiply(pairs))
    return added


def _add_group(
    work: Work,
    k_iter: jax.Array,
    g: int,
    accumulators: list[jax.Array],
    tile_scale: jax.Array | None,
    operand: _Operand | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[jax.Array]:
    """Adds a group of inputs; while a slice or term is multiplied, the one before it is added.

    The tile is unpacked here where no operand is given. `meanwhile` is called while products run.
    """
    accumulators, slices, stage = list(accumulators), work.tiling.row_slices, work.stage_of(k_iter)
    if operand is None:
        is_mxfp4, codes = work.shapes.is_mxfp4, work.codes_of(stage, work.warpgroup, g)
        operand = _Operand(*work.unpack(stage, g)) if is_mxfp4 else _Operand(codes)
    left, factor = operand  # e4m3[64, 128] in shared memory or registers; f32[64] or None
    jobs = list(itertools.product(range(len(slices)), range(work.shapes.num_terms)))

    def begin(number: int, term: int) -> jax.Array:
        rows = _rows_of(work, k_iter, g, term, slices[number])  # e4m3[rows, 128]
        [product] = wgmma.begin(left, rows, slices[number][1:])  # f32[64, rows], not there yet
        return product

    def scale_of(number: int, term: int) -> jax.Array:
        scales = work.row_scales(k_iter, g, term, *slices[number])
        # Rows of x are columns of a product: a thread loads the scales of the columns that it has.
        return plgpu.load(scales, layout=_LAYOUT.reduce(0), optimized=False)

    early = scale_of(*jobs[0]) if len(jobs) == 1 else None  # it has registers
    running = [begin(*jobs[0])]
    for i, (number, term) in enumerate(jobs):
        running += [begin(*following) for following in jobs[i + 1 : i + 2]]
        if i == 0 and meanwhile is not None:
            meanwhile()
        scale = scale_of(number, term) if early is None else early
        scale = scale if tile_scale is None else scale * tile_scale
        shape = WARPGROUP_N, slices[number][1]
        scale = lax.broadcast_in_dim(scale, shape, [1])
        if factor is not None:  # first, since a thread has one for two rows
            scale = scale * lax.broadcast_in_dim(factor, shape, [0])
        in_flight = len(running) - 1 - i
        [product] = wgmma.finish(running[i : i + 1], in_flight=in_flight)
        accumulators[number] = wgmma.settle(accumulators[number] + product * scale)
    return accumulators


def _rows_of(work: Work, k_iter: jax.Array, g: int, term: int, rows: tuple[int, int]) -> Any:
    """A slice of a term of x, in shared memory."""
    of_term = work.rows_of(k_iter, g, term)
    return of_term if len(work.tiling.row_slices) == 1 else of_term.at[pl.ds(*rows)]


def _activate(work: Work, accumulators: list[jax.Array], swiglu: SwiGLU, store: Any) -> None:
    """Consumer 1 hands the up projection to consumer 0, which has the gate's and stores.

    A thread takes what the same thread of the other warpgroup left: no layout changes on the way.
    """
    tiling, scratch = work.tiling, work.scratch

    @pl.when(work.warpgroup == 1)
    def _():
        for up in accumulators:
            exchange.store(scratch.up_smem, jnp.clip(up, -swiglu.limit, swiglu.limit))
            plgpu.commit_smem()  # visible to the other warpgroup before it is told
            plgpu.barrier_arrive(scratch.up_full)  # consumer 0's from here on
            if tiling.reuses_exchange:
                plgpu.barrier_wait(scratch.up_empty)  # and consumer 1's again

    @pl.when(work.warpgroup == 0)
    def _():
        for (first, width), gate in zip(tiling.row_slices, accumulators, strict=True):
            row = work.tile.first_row + first if first else work.tile.first_row
            activated = work.activate(gate, swiglu.limit, row, _LAYOUT)
            plgpu.barrier_wait(scratch.up_full)  # until consumer 1 has written
            up = exchange.load(scratch.up_smem, (WARPGROUP_N, width))
            if tiling.reuses_exchange:
                plgpu.barrier_arrive(scratch.up_empty)  # loaded: consumer 1 may write again
            store(activated * up, first)


def _store(work: Work, outputs: list[Any], values: jax.Array, first: int) -> None:
    """A consumer's outputs of some rows, the first of which is `first` of the tile's."""
    row, num_rows = work.tile.target_row, work.tile.num_rows
    if first:
        row, num_rows = row + first, num_rows - first

    def store_tile(out_gmem: Any, tile: jax.Array) -> None:
        # Products are [outputs, rows] and results [rows, outputs]: transposed on the way.
        store = store_pairs if work.tiling.packed_stores else store_transposed
        store(
            out_gmem.at[work.tile.split],
            values.astype(out_gmem.dtype),
            Place(row, num_rows, tile * WARPGROUP_N),
            operand_order=work.shapes.is_mxfp4,
        )

    if len(outputs) == 1:
        store_tile(outputs[0], work.warpgroup_tile(work.warpgroup))
        return
    for out_gmem, (owns, tile) in zip(outputs, work.tiles_of_weights(work.warpgroup), strict=True):
        pl.when(owns)(functools.partial(store_tile, out_gmem, tile))
