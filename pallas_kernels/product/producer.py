"""What the producer warpgroup does: it copies operands of a tile in bulk, stage after stage.

codes and scales of the weights, x and its scales -> a stage -> `full`
`empty` -> the same stage, `Tiling.stages` k_iters later
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.product.tiling import CONSUMERS, WARPGROUP_N, scale_rows
from pallas_kernels.product.triton_rows import Rows
from pallas_kernels.product.work import Work

plgpu: Any = mosaic_gpu


def fill_stages(work: Work) -> None:
    """Fills a stage for each k_iter of the tile."""

    def fill(k_iter: jax.Array, _: None) -> None:
        stage = work.stage_of(k_iter)

        # The first `stages` k_iters of a CTA find their stages empty; the others wait until both
        # consumers have read what was there.
        @pl.when(work.since_launch(k_iter) >= work.tiling.stages)
        def _():
            # Each consumer arrives when no product or load of its own reads the stage any more.
            plgpu.barrier_wait(work.scratch.empty.at[stage])

        # The consumers' from here on until it is full: each copy arrives at `full` by itself.
        group = work.group_of(k_iter)
        _copy_weights(work, group, stage)
        if not work.shapes.rounds_rows:
            _copy_rows(work, group, stage)

    lax.fori_loop(0, work.k_iters, fill, None)
    if work.k_iters_before is None and interpreting():
        await_empty(work, work.k_iters)


def await_empty(work: Work, k_iters: int | jax.Array) -> None:
    """Waits until what so many k_iters brought in was read.

    The interpreter, in jax 0.11, wants every completion of a barrier seen.
    """
    for stage in range(work.tiling.stages):
        wait = functools.partial(plgpu.barrier_wait, work.scratch.empty.at[stage])
        if isinstance(k_iters, int):
            if stage < k_iters:
                wait()
        else:
            pl.when(stage < k_iters)(wait)


def _copy_weights(work: Work, group: jax.Array, stage: jax.Array) -> None:
    """Both consumers' tiles of a stage, each of the weight that has it."""
    for consumer in range(CONSUMERS):
        for which, (owns, tile) in enumerate(work.tiles_of_weights(consumer)):
            copy = functools.partial(_copy_tile, work, which, tile, group, stage, consumer)
            if len(work.shapes.warpgroup_tiles) == 1 or owns is True:
                copy()
            elif owns is not False:
                pl.when(owns)(copy)


def _copy_tile(
    work: Work, which: int, tile: jax.Array, group: jax.Array, stage: jax.Array, consumer: int
) -> None:
    """A consumer's [64, tile_k] of a weight, and MXFP4's scales of it."""
    scratch, inputs, groups = work.scratch, work.inputs, work.groups_of_stage
    codes, full = inputs.codes[which], scratch.full.at[stage]
    if work.shapes.is_mxfp4:  # a stage lies together: copied as one, not by rows of 64 bytes
        run = work.tile.weight, tile, pl.ds(group, groups)
        together = functools.partial(
            plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        )
        together(codes.at[run], scratch.codes_smem.at[stage, consumer], full)
        target = scratch.words_smem.at[stage, consumer]
        together(inputs.scales[which].at[run], target, full)
        return
    for g in range(groups):
        inner = pl.ds((group + g) * work.shapes.group_k, work.shapes.group_k)
        source = codes.at[work.tile.weight, pl.ds(tile * WARPGROUP_N, WARPGROUP_N), inner]
        # The engine swizzles lines of 128 bytes on the way, as the tensor core wants them.
        plgpu.copy_gmem_to_smem(source, work.codes_of(stage, consumer, g), full)


def _copy_rows(work: Work, group: jax.Array, stage: jax.Array) -> None:
    """x, [tile_m, tile_k] of each term, and its scales."""
    scratch, rows, tile_m = work.scratch, work.inputs.rows, work.tiling.tile_m
    assert isinstance(rows, Rows)
    full, groups = scratch.full.at[stage], work.groups_of_stage
    for term in range(work.shapes.num_terms):
        for g in range(groups):
            inner = pl.ds((group + g) * work.shapes.group_k, work.shapes.group_k)
            source = rows.codes.at[term, pl.ds(work.tile.first_row, tile_m), inner]
            # [tile_m, group_k], swizzled like the weights; all rows, of which a tile may have
            # fewer.
            plgpu.copy_gmem_to_smem(source, scratch.rows_smem.at[stage, term, g], full)
        if rows.scale is None:
            continue
        # More scales than rows where those are few: a copy takes multiples of 128 bytes.
        width = pl.ds(work.tile.first_row, scale_rows(tile_m))
        source = rows.scale.at[term, pl.ds(group, groups), width]
        plgpu.copy_gmem_to_smem(source, scratch.scales_smem.at[stage, term], full)  # all groups
