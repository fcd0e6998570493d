"""Products of rows with weights on Blackwell: what its two consumers do. It has run on no card.

A product has 128 rows there, both consumers' tiles of 64 outputs, and goes to tensor memory:

    FP8, dense     the tiles as they lie in shared memory
    MXFP4          each consumer unpacks its tile to E4M3               -> unpacked_smem
    consumer 0     starts [128, columns] = tiles x^T, f32, a group of inputs ahead -> products_tmem
    consumer g     its half of the columns:
                   sum += product * scale of the tile (FP8) or row (MXFP4) * scale of x

With a gate and an up projection, the upper 64 rows are the up's, and two of a consumer's warps have
them.

Products of FP8 codes with scales of 32 inputs, which Blackwell has, serve neither format: block FP8
allows scales of any f32, and MXFP4's codes would have to be multiplied with FP4 codes of x.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import ROWS
from pallas_kernels.gpu import mosaic_memory
from pallas_kernels.product import exchange
from pallas_kernels.product.call_shapes import BUFFERS, CONSUMERS
from pallas_kernels.product.store_transposed import Place, store_transposed
from pallas_kernels.product.work import SwiGLU, Work

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.TCGEN05
_HEIGHT = CONSUMERS * ROWS


def consume(work: Work, outputs: list[Any], swiglu: SwiGLU | None) -> None:
    """Multiplies stage after stage, and stores the sums."""
    s, tiling, scratch, group = work.shapes, work.tiling, work.scratch, work.group
    [out_gmem], columns = outputs, tiling.columns
    width = columns // CONSUMERS
    mine = group * width
    own_rows = pl.ds(group * ROWS, ROWS)

    def buffer_of(turn: int | jax.Array, b: int) -> jax.Array:
        return lax.rem(jnp.int32(turn * tiling.blocks + b), BUFFERS)

    def products_of(buffer: jax.Array, part: int, first: Any, count: int) -> Any:
        start = (buffer * s.num_parts + part) * columns + first
        return scratch.products_tmem.at[:, pl.ds(start, count)]

    def start(turn: int | jax.Array, b: int) -> None:
        """Starts the products of a group of inputs."""
        slot, buffer = lax.rem(jnp.int32(turn), tiling.stages), buffer_of(turn, b)
        if b == 0:
            plgpu.barrier_wait(scratch.ready.at[slot])

        @pl.when(turn * tiling.blocks + b >= BUFFERS)
        def _():
            plgpu.barrier_wait(scratch.products_read.at[buffer])

        if s.is_mxfp4:
            operand, factor = work.unpack(slot, b)
            target = scratch.unpacked_smem.at[buffer, own_rows]
            mosaic_memory.store_shared(target, operand, plgpu.Layout.WGMMA_8BIT)
            target = scratch.factors_smem.at[buffer, own_rows]
            mosaic_memory.store_shared(target, factor, plgpu.Layout.WGMMA.reduce(1))
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.unpacked.at[buffer])
            plgpu.barrier_wait(scratch.unpacked.at[buffer])

        @pl.when(group == 0)
        def _():
            tiles = scratch.codes_smem.at[slot, b]
            if s.is_mxfp4:
                tiles = scratch.unpacked_smem.at[buffer]
            for part in range(s.num_parts):
                rows = work.rows_of(jnp.int32(turn), b, part).transpose((1, 0))
                products = products_of(buffer, part, 0, columns)
                plgpu.tcgen05_mma(products, tiles, rows, accumulate=False)
            plgpu.tcgen05_commit_arrive(scratch.products_ready.at[buffer])

    def scales_of(turn: int | jax.Array) -> list[list[jax.Array]]:
        """f32[] for each group of inputs of a stage, and each tile."""
        if not s.is_fp8:
            return []
        return [
            [work.scale_of_tile(tile, work.block_of(turn, b)) for tile in range(CONSUMERS)]
            for b in range(tiling.blocks)
        ]

    def factor_of(buffer: jax.Array, tile_scales: list[jax.Array]) -> jax.Array:
        """f32[128], of each row of the tiles."""
        by_row = _LAYOUT.reduce(1)
        if s.is_mxfp4:
            return plgpu.load(scratch.factors_smem.at[buffer], layout=by_row, optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, (_HEIGHT,), 0, layout=by_row)
        return jnp.where(row < ROWS, *tile_scales)

    def add(turn: jax.Array, b: int, total: jax.Array, tile_scales: Any) -> jax.Array:
        """Adds the products of a group of inputs."""
        buffer = buffer_of(turn, b)
        scales = []
        if not s.is_dense:
            scales = [
                plgpu.load(
                    work.row_scales(turn, b, part, mine, width),
                    layout=_LAYOUT.reduce(0),
                    optimized=False,
                )
                for part in range(s.num_parts)
            ]
        plgpu.barrier_wait(scratch.products_ready.at[buffer])
        for part in range(s.num_parts):
            product = plgpu.async_load_tmem(products_of(buffer, part, mine, width), layout=_LAYOUT)
            plgpu.wait_load_tmem()
            if not s.is_dense:
                factor = factor_of(buffer, tile_scales[b] if s.is_fp8 else [])
                product = product * lax.broadcast_in_dim(factor, product.shape, [0])
                scale = lax.broadcast_in_dim(scales[part], product.shape, [1])
                product = product * plgpu.layout_cast(scale, _LAYOUT)
            total = total + product
        plgpu.barrier_arrive(scratch.products_read.at[buffer])
        return total

    def add_stage(turn: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        total, tile_scales = carry
        next_scales = scales_of(turn + 1)
        for b in range(tiling.blocks):
            if b + 1 < tiling.blocks:
                start(turn, b + 1)
            else:
                pl.when(turn + 1 < work.turns)(lambda: start(turn + 1, 0))
            total = add(turn, b, total, tile_scales)
        if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.free.at[lax.rem(turn, tiling.stages)])
        return total, next_scales

    zeros = plgpu.layout_cast(jnp.zeros((_HEIGHT, width), jnp.float32), _LAYOUT)
    work.await_rows()
    start(0, 0)
    total, _ = lax.fori_loop(0, work.turns, add_stage, (zeros, scales_of(0)))
    if interpreting():  # as in `Work.produce`
        for buffer in range(min(BUFFERS, work.turns * tiling.blocks)):
            plgpu.barrier_wait(scratch.products_read.at[buffer])

    def store(values: jax.Array, first_column: jax.Array, num_columns: int) -> None:
        store_transposed(
            out_gmem.at[work.tile.split],
            values.astype(out_gmem.dtype),
            Place(work.tile.target_row + mine, work.tile.num_rows - mine, first_column),
            operand_order=s.is_mxfp4,
            num_columns=num_columns,
            layout=_LAYOUT,
        )

    if swiglu is None:
        store(total, work.tile.place * _HEIGHT, _HEIGHT)
        return
    total = total.astype(swiglu.dtype).astype(jnp.float32)
    up_smem = scratch.up_smem.at[pl.ds(mine * ROWS, width * ROWS)]
    exchange.store_upper(up_smem, jnp.clip(total, -swiglu.limit, swiglu.limit), _LAYOUT)
    plgpu.commit_smem()
    gate = work.activate(total, swiglu.limit, work.tile.first + mine, _LAYOUT)
    up = exchange.load_lower(up_smem, total.shape, _LAYOUT)
    store(gate * up, work.tile.place * ROWS, ROWS)
