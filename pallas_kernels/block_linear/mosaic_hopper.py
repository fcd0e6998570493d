"""Products of rows with weights on Hopper: what its two consumers do.

Consumer g has a tile of 64 outputs, the left operand of a product whose right one is x:

    FP8, dense    the tile as it lies in shared memory
    MXFP4         unpacked to E4M3 in registers
    [64, columns] = tile x^T, f32, per group of inputs
    sum += product * scale of the tile (FP8) or row (MXFP4) * scale of x

With a gate and an up projection, consumer 0 has the gate's tile and consumer 1 the up's.

Sums of the FP8 tensor core keep some 14 bits below their largest term, over 128 inputs.
"""

from __future__ import annotations

import functools
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
from pallas_kernels.gpu import exchange, mosaic
from pallas_kernels.gpu.store_transposed import store_transposed

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA


def consume(work: Work, outputs: list[Any], swiglu: SwiGLU | None) -> None:
    """Multiplies stage after stage, and stores the sums."""
    s, tiling, scratch, group = work.shapes, work.tiling, work.scratch, work.group
    columns = tiling.columns

    def multiply(turn: jax.Array, b: int) -> list[jax.Array]:
        """f32[64, columns] for each part of x, scaled by row."""
        slot = lax.rem(turn, tiling.stages)
        parts = [work.rows_of(turn, b, part) for part in range(s.num_parts)]
        if not s.is_mxfp4:
            codes = work.codes_of(slot, group, b)
            return [mosaic.multiply([(codes, x.transpose((1, 0)))]) for x in parts]
        operand, factor = work.unpack(slot, b)
        factor = lax.broadcast_in_dim(factor, (ROWS, columns), [0])
        return [mosaic.multiply_registers(operand, x) * factor for x in parts]

    def add_scaled(turn: jax.Array, total: jax.Array, tile_scales: list[jax.Array]) -> jax.Array:
        for b in range(tiling.blocks):
            for part, product in enumerate(multiply(turn, b)):
                scale = plgpu.load(
                    work.row_scales(turn, b, part, 0, columns),
                    layout=_LAYOUT.reduce(0),
                    optimized=False,
                )
                if s.is_fp8:
                    scale = scale * tile_scales[b]
                total = total + product * lax.broadcast_in_dim(scale, product.shape, [1])
        return total

    def add_dense(turn: jax.Array, total: jax.Array) -> jax.Array:
        slot = lax.rem(turn, tiling.stages)
        pairs = [
            (work.codes_of(slot, group, b), work.rows_of(turn, b, 0).transpose((1, 0)))
            for b in range(tiling.blocks)
        ]
        return total + mosaic.multiply(pairs)

    def add_stage(
        turn: jax.Array, carry: tuple[jax.Array, list[jax.Array]]
    ) -> tuple[jax.Array, list[jax.Array]]:
        total, tile_scales = carry
        slot = lax.rem(turn, tiling.stages)
        plgpu.barrier_wait(scratch.ready.at[slot])
        next_scales = scales_of(turn + 1)
        total = add_dense(turn, total) if s.is_dense else add_scaled(turn, total, tile_scales)
        if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.free.at[slot])
        return total, next_scales

    def scales_of(turn: int | jax.Array) -> list[jax.Array]:
        if not s.is_fp8:
            return []
        return [work.scale_of_tile(group, work.block_of(turn, b)) for b in range(tiling.blocks)]

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), _LAYOUT)
    first_scales = scales_of(0)
    work.await_rows()
    total, _ = lax.fori_loop(0, work.turns, add_stage, (zeros, first_scales))

    def store_tile(out_gmem: Any, values: jax.Array, tile: jax.Array) -> None:
        store_transposed(
            out_gmem.at[work.split],
            values.astype(out_gmem.dtype),
            first_row=work.target_row,
            num_rows=work.num_rows,
            first_column=tile * ROWS,
            operand_order=s.is_mxfp4,
        )

    def store(values: jax.Array) -> None:
        if len(outputs) == 1:
            store_tile(outputs[0], values, work.tile_of(group))
            return
        for out_gmem, (owns, tile) in zip(outputs, work.tiles_of_weights(group), strict=True):
            pl.when(owns)(functools.partial(store_tile, out_gmem, values, tile))

    if swiglu is None:

        @pl.when(work.place * CONSUMERS + group <= work.last_tile)
        def _():
            store(total)

        return
    total = total.astype(swiglu.dtype).astype(jnp.float32)

    @pl.when(group == 1)
    def _():
        exchange.store(scratch.up_smem, jnp.clip(total, -swiglu.limit, swiglu.limit))
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.up_ready)

    @pl.when(group == 0)
    def _():
        gate = work.activate(total, swiglu.limit, work.first, _LAYOUT)
        plgpu.barrier_wait(scratch.up_ready)
        store(gate * exchange.load(scratch.up_smem, total.shape))
