"""Products of rows with weights on Hopper, weights on the left: what its two consumers do.

Block FP8 with many rows is multiplied in `mosaic_hopper_rows`.

Consumer g has a tile of 64 outputs, the left operand of a product whose right one is x:

    FP8, dense    the tile as it lies in shared memory
    MXFP4         unpacked to E4M3 in registers
    [64, columns] = tile x^T, f32, per group of inputs
    sum += product * scale of the tile (FP8) or row (MXFP4) * scale of x

More than 64 rows of x are several such products, pieces of the columns, with sums of their own;
while one runs, the one before it is added. MXFP4's factor is one for both rows of a thread.

With a gate and an up projection, consumer 0 has the gate's tile and consumer 1 the up's.

Sums of the FP8 tensor core keep some 14 bits below their largest term, over 128 inputs.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.block_linear.call_shapes import CONSUMERS
from pallas_kernels.block_linear.work import SwiGLU, Work
from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import ROWS
from pallas_kernels.gpu import exchange, mosaic, running_product
from pallas_kernels.gpu.store_pairs import store_pairs
from pallas_kernels.gpu.store_transposed import Place, store_transposed

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA


def consume(work: Work, outputs: list[Any], swiglu: SwiGLU | None) -> None:
    """Multiplies stage after stage, and stores the sums."""
    s, tiling, scratch, group = work.shapes, work.tiling, work.scratch, work.group

    def rows_of(turn: jax.Array, b: int, part: int, piece: tuple[int, int]) -> Any:
        rows = work.rows_of(turn, b, part)
        return rows if len(tiling.pieces) == 1 else rows.at[pl.ds(*piece)]

    def left_of(turn: jax.Array, b: int) -> tuple[Any, jax.Array | None]:
        """The left operand of a group of inputs, and MXFP4's factor of each row."""
        slot = work.slot_of(turn)
        return work.unpack(slot, b) if s.is_mxfp4 else (work.codes_of(slot, group, b), None)

    jobs = list(itertools.product(range(len(tiling.pieces)), range(s.num_parts)))

    def scale_of(turn: jax.Array, b: int, number: int, part: int) -> jax.Array:
        scales = work.row_scales(turn, b, part, *tiling.pieces[number])
        return plgpu.load(scales, layout=_LAYOUT.reduce(0), optimized=False)

    def begin(left: Any, turn: jax.Array, b: int, number: int, part: int) -> jax.Array:
        piece = tiling.pieces[number]
        [product] = running_product.begin(left, rows_of(turn, b, part, piece), piece[1:])
        return product

    def add_scaled(
        turn: jax.Array, totals: list[jax.Array], tile_scales: list[jax.Array]
    ) -> list[jax.Array]:
        for b in range(tiling.blocks):
            left, factor = left_of(turn, b)
            early = scale_of(turn, b, *jobs[0]) if len(jobs) == 1 else None  # it has registers
            running = [begin(left, turn, b, *jobs[0])]
            for i, job in enumerate(jobs):
                running += [begin(left, turn, b, *following) for following in jobs[i + 1 : i + 2]]
                shape = ROWS, tiling.pieces[job[0]][1]
                scale = scale_of(turn, b, *job) if early is None else early
                scale = scale * tile_scales[b] if s.is_fp8 else scale
                scale = lax.broadcast_in_dim(scale, shape, [1])
                if factor is not None:  # first, since a thread has one for two rows
                    scale = scale * lax.broadcast_in_dim(factor, shape, [0])
                in_flight = len(running) - 1 - i
                [product] = running_product.finish(running[i : i + 1], in_flight=in_flight)
                totals[job[0]] = running_product.settle(totals[job[0]] + product * scale)
        return totals

    def add_dense(turn: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        slot = work.slot_of(turn)
        for number, piece in enumerate(tiling.pieces):
            pairs = [
                (work.codes_of(slot, group, b), rows_of(turn, b, 0, piece).transpose((1, 0)))
                for b in range(tiling.blocks)
            ]
            totals[number] = totals[number] + mosaic.multiply(pairs)
        return totals

    def add_stage(
        turn: jax.Array, carry: tuple[list[jax.Array], list[jax.Array]]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        totals, tile_scales = carry
        slot = work.slot_of(turn)
        plgpu.barrier_wait(scratch.ready.at[slot])
        next_scales = scales_of(turn + 1)
        add = add_dense if s.is_dense else functools.partial(add_scaled, tile_scales=tile_scales)
        totals = add(turn, list(totals))
        if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.free.at[slot])
        return totals, next_scales

    def scales_of(turn: int | jax.Array) -> list[jax.Array]:
        if not s.is_fp8:
            return []
        return [work.scale_of_tile(group, work.block_of(turn, b)) for b in range(tiling.blocks)]

    zeros = [
        plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), _LAYOUT)
        for _, width in tiling.pieces
    ]
    first_scales = scales_of(0)
    work.await_rows()
    totals, _ = lax.fori_loop(0, work.turns, add_stage, (zeros, first_scales))
    store = functools.partial(_store, work, outputs)
    if swiglu is None:

        @pl.when(work.tile.place * CONSUMERS + group <= work.last_tile)
        def _():
            for (first, _), total in zip(tiling.pieces, totals, strict=True):
                store(total, first)

        return
    totals = [total.astype(swiglu.dtype).astype(jnp.float32) for total in totals]

    @pl.when(group == 1)
    def _():
        for total in totals:
            exchange.store(scratch.up_smem, jnp.clip(total, -swiglu.limit, swiglu.limit))
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.up_ready)
            if tiling.exchanges_in_turns:
                plgpu.barrier_wait(scratch.up_read)

    @pl.when(group == 0)
    def _():
        for (first, _), total in zip(tiling.pieces, totals, strict=True):
            row = work.tile.first + first if first else work.tile.first
            gate = work.activate(total, swiglu.limit, row, _LAYOUT)
            plgpu.barrier_wait(scratch.up_ready)
            up = exchange.load(scratch.up_smem, total.shape)
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
