"""Products of rows with weights on Hopper, weights on the left: what its two consumers do.

Block FP8 with many rows is multiplied in `mosaic_hopper_rows`.

Consumer g has a tile of 64 outputs, the left operand of a product whose right one is x:

    FP8, dense    the tile as it lies in shared memory
    MXFP4         unpacked to E4M3 in registers
    [64, columns] = tile x^T, f32, per group of inputs
    sum += product * scale of the tile (FP8) or row (MXFP4) * scale of x

More than 64 rows of x are several such products, pieces of the columns, with sums of their own;
while one runs, the one before it is added. MXFP4's factor is one for both rows of a thread, and the
next tile is loaded while products run.

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
from pallas_kernels.common.weights import ROWS
from pallas_kernels.gpu import mosaic
from pallas_kernels.product import exchange, wgmma
from pallas_kernels.product.call_shapes import CONSUMERS
from pallas_kernels.product.store_pairs import store_pairs
from pallas_kernels.product.store_transposed import Place, store_transposed
from pallas_kernels.product.work import SwiGLU, Work

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA


def consume(work: Work, outputs: list[Any], swiglu: SwiGLU | None) -> None:
    """Multiplies stage after stage, and stores the sums."""
    totals = _add_up(work)
    store = functools.partial(_store, work, outputs)
    if swiglu is not None:
        totals = [total.astype(swiglu.dtype).astype(jnp.float32) for total in totals]
        _activate(work, totals, swiglu, store)
        return

    @pl.when(work.tile.place * CONSUMERS + work.group <= work.last_tile)
    def _():
        for (first, _), total in zip(work.tiling.pieces, totals, strict=True):
            store(total, first)


def _add_up(work: Work) -> list[jax.Array]:
    """f32[64, columns] of each piece."""
    scratch, blocks = work.scratch, range(work.tiling.blocks)

    def tile_scales_of(turn: int | jax.Array) -> list[jax.Array]:
        if not work.shapes.is_fp8:
            return []
        return [work.scale_of_tile(work.group, work.block_of(turn, b)) for b in blocks]

    def add_stage(
        turn: jax.Array, carry: tuple[list[jax.Array], list[jax.Array]]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        totals, tile_scales = carry
        slot = work.slot_of(turn)
        plgpu.barrier_wait(scratch.ready.at[slot])
        next_scales = tile_scales_of(turn + 1)
        if work.shapes.is_dense:
            totals = _add_dense(work, turn, totals)
        else:
            for b in blocks:
                tile_scale = tile_scales[b] if tile_scales else None
                totals = _add_scaled(work, turn, b, totals, tile_scale)
        if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.free.at[slot])
        return totals, next_scales

    zeros = [
        plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), _LAYOUT)
        for _, width in work.tiling.pieces
    ]
    first_scales = tile_scales_of(0)
    work.await_rows()
    if work.shapes.loads_ahead(work.tiling.columns):
        return _add_ahead(work, zeros)
    totals, _ = lax.fori_loop(0, work.turns, add_stage, (zeros, first_scales))
    return totals


def _add_ahead(work: Work, totals: list[jax.Array]) -> list[jax.Array]:
    """Adds stages of MXFP4, a group of inputs each, and loads the next tile while products run."""
    assert work.tiling.blocks == 1

    def take(turn: jax.Array) -> _Operand:
        slot = work.slot_of(turn)
        plgpu.barrier_wait(work.scratch.ready.at[slot])
        return _Operand(*work.unpack(slot, 0))

    def add_stage(
        turn: jax.Array, carry: tuple[list[jax.Array], _Operand]
    ) -> tuple[list[jax.Array], _Operand]:
        totals, operand = carry
        following: list[_Operand] = []
        totals = _add_scaled(
            work, turn, 0, totals, None, operand, lambda: following.append(take(turn + 1))
        )
        give_back(turn)
        return totals, following[0]

    def give_back(turn: jax.Array) -> None:
        if interpreting():  # see above
            plgpu.commit_smem()
        plgpu.barrier_arrive(work.scratch.free.at[work.slot_of(turn)])

    last = jnp.int32(work.turns - 1)
    totals, operand = lax.fori_loop(0, last, add_stage, (totals, take(jnp.int32(0))))
    totals = _add_scaled(work, last, 0, totals, None, operand)
    give_back(last)
    return totals


def _add_dense(work: Work, turn: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
    """Adds a stage of dense weights."""
    slot, group, blocks = work.slot_of(turn), work.group, range(work.tiling.blocks)
    added = []
    for total, piece in zip(totals, work.tiling.pieces, strict=True):
        pairs = [
            (work.codes_of(slot, group, b), _rows_of(work, turn, b, 0, piece).transpose((1, 0)))
            for b in blocks
        ]
        added.append(total + mosaic.multiply(pairs))
    return added


class _Operand(NamedTuple):
    """A tile as the left operand: MXFP4 in registers, with a factor f32[64] of its rows."""

    left: Any
    factor: jax.Array | None = None


def _add_scaled(
    work: Work,
    turn: jax.Array,
    b: int,
    totals: list[jax.Array],
    tile_scale: jax.Array | None,
    operand: _Operand | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[jax.Array]:
    """Adds a group of inputs; while a piece or part is multiplied, the one before it is added.

    The tile is unpacked here where no operand is given. `meanwhile` is called while products run.
    """
    totals, pieces, slot = list(totals), work.tiling.pieces, work.slot_of(turn)
    if operand is None:
        is_mxfp4, codes = work.shapes.is_mxfp4, work.codes_of(slot, work.group, b)
        operand = _Operand(*work.unpack(slot, b)) if is_mxfp4 else _Operand(codes)
    left, factor = operand
    jobs = list(itertools.product(range(len(pieces)), range(work.shapes.num_parts)))

    def begin(number: int, part: int) -> jax.Array:
        rows = _rows_of(work, turn, b, part, pieces[number])
        [product] = wgmma.begin(left, rows, pieces[number][1:])
        return product

    def scale_of(number: int, part: int) -> jax.Array:
        scales = work.row_scales(turn, b, part, *pieces[number])
        return plgpu.load(scales, layout=_LAYOUT.reduce(0), optimized=False)

    early = scale_of(*jobs[0]) if len(jobs) == 1 else None  # it has registers
    running = [begin(*jobs[0])]
    for i, (number, part) in enumerate(jobs):
        running += [begin(*following) for following in jobs[i + 1 : i + 2]]
        if i == 0 and meanwhile is not None:
            meanwhile()
        scale = scale_of(number, part) if early is None else early
        scale = scale if tile_scale is None else scale * tile_scale
        shape = ROWS, pieces[number][1]
        scale = lax.broadcast_in_dim(scale, shape, [1])
        if factor is not None:  # first, since a thread has one for two rows
            scale = scale * lax.broadcast_in_dim(factor, shape, [0])
        in_flight = len(running) - 1 - i
        [product] = wgmma.finish(running[i : i + 1], in_flight=in_flight)
        totals[number] = wgmma.settle(totals[number] + product * scale)
    return totals


def _rows_of(work: Work, turn: jax.Array, b: int, part: int, piece: tuple[int, int]) -> Any:
    """A piece of a part of x, in shared memory."""
    rows = work.rows_of(turn, b, part)
    return rows if len(work.tiling.pieces) == 1 else rows.at[pl.ds(*piece)]


def _activate(work: Work, totals: list[jax.Array], swiglu: SwiGLU, store: Any) -> None:
    """Consumer 1 hands the up projection to consumer 0, which has the gate's and stores."""
    tiling, scratch = work.tiling, work.scratch

    @pl.when(work.group == 1)
    def _():
        for total in totals:
            exchange.store(scratch.up_smem, jnp.clip(total, -swiglu.limit, swiglu.limit))
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.up_ready)
            if tiling.exchanges_in_turns:
                plgpu.barrier_wait(scratch.up_read)

    @pl.when(work.group == 0)
    def _():
        for (first, width), total in zip(tiling.pieces, totals, strict=True):
            row = work.tile.first + first if first else work.tile.first
            gate = work.activate(total, swiglu.limit, row, _LAYOUT)
            plgpu.barrier_wait(scratch.up_ready)
            up = exchange.load(scratch.up_smem, (ROWS, width))
            if tiling.exchanges_in_turns:
                plgpu.barrier_arrive(scratch.up_read)
            store(gate * up, first)


def _store(work: Work, outputs: list[Any], values: jax.Array, first: int) -> None:
    """A consumer's outputs of some rows, the first of which is `first` of the tile's."""
    row, num_rows = work.tile.target_row, work.tile.num_rows
    if first:
        row, num_rows = row + first, num_rows - first

    def store_tile(out_gmem: Any, tile: jax.Array) -> None:
        store = store_pairs if work.tiling.packs else store_transposed
        store(
            out_gmem.at[work.tile.split],
            values.astype(out_gmem.dtype),
            Place(row, num_rows, tile * ROWS),
            operand_order=work.shapes.is_mxfp4,
        )

    if len(outputs) == 1:
        store_tile(outputs[0], work.tile_of(work.group))
        return
    for out_gmem, (owns, tile) in zip(outputs, work.tiles_of_weights(work.group), strict=True):
        pl.when(owns)(functools.partial(store_tile, out_gmem, tile))
