"""Products of rows with quantised weights through Mosaic GPU, for Hopper.

One CTA: 128 rows of weights, some rows of x, a run of inputs in groups of 128. Weights are the side
of a product that has 64 rows, x the side that may have as few as 8. Warpgroups:

    producer      codes and scales of a stage of weights and of x, in bulk       -> a stage
    consumer g    FP8: a tile as it lies; MXFP4: unpacked to E4M3 in registers
                  [64, columns] = tile x^T on FP8 tensor cores, f32
                  sum += product * scale of the tile (FP8) or row (MXFP4) * scale of x, per group

Rows of x that are not rounded come as two parts, each E4M3, that add up. With a gate and an up
projection, consumer 0 has the gate's tile and consumer 1 the up's, and SwiGLU follows.

A list of items says which weight of a stack multiplies which rows, so that grouped products and
experts are the same kernel. Bytes bound it up to some 64 rows of x: those of the weights, once.
Sums of the FP8 tensor core keep some 14 bits below their largest term, over 128 inputs.
Measurements and roads not taken: docs/kernels/block_linear.md.
Source: deepseek_v4.md sections 1.5 and 4.5.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.block_linear.call_shapes import CONSUMERS, Shapes, Tiling, scale_columns
from pallas_kernels.block_linear.items import EvenItems, Items
from pallas_kernels.block_linear.triton_rows import Rows
from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import INPUTS, MXFP4, ROWS, QuantizedWeight
from pallas_kernels.gpu import exchange, left_operand, mosaic, unpack_mxfp4
from pallas_kernels.gpu.store_transposed import store_transposed

plgpu: Any = mosaic_gpu
REGISTERS = (232, 40)
"""Registers of a consumer's thread and a producer's; 2 + 1 warpgroups share 3 * 168."""


class Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs in device memory.

    Attributes:
      items: see `Items`; None where they follow from their number.
      rows: see `triton_rows.Rows`.
      codes: of each weight.
      scales: of each weight.
      magnitudes: i32[20, 2], the table of `unpack_mxfp4`.
      share: f32[R], factor of each row after SwiGLU, or None.
    """

    items: Items | None
    rows: Rows
    codes: Any
    scales: Any
    magnitudes: Any
    share: Any


class Scratch(NamedTuple):
    """Stages in shared memory, their barriers, and what gate and up exchange."""

    codes_smem: Any
    words_smem: Any
    rows_smem: Any
    scales_smem: Any
    ready: Any
    free: Any
    up_smem: Any
    up_ready: Any


class SwiGLU(NamedTuple):
    """What follows a gate and an up projection.

    Attributes:
      limit: see `expert_mlp`.
      dtype: to which both are rounded before.
    """

    limit: float
    dtype: Any


def _kernel(
    inputs: Operands,
    out_gmem: Any,
    scratch: Scratch,
    *,
    shapes: Shapes,
    tiling: Tiling,
    even: EvenItems | None,
    swiglu: SwiGLU | None,
) -> None:
    s, columns = shapes, tiling.columns
    split, item, place = (lax.axis_index(name) for name in ("split", "item", "out"))
    group = lax.axis_index("warpgroup")
    items = even or inputs.items
    assert items is not None
    weight, first, target_row, num_rows = items.of(item, columns)
    turns = s.num_blocks // (tiling.blocks * tiling.splits)
    first_block = split * turns * tiling.blocks
    last_tile = s.num_tiles - 1

    def tile_of(consumer: int | jax.Array) -> jax.Array:
        """The 64 outputs of a consumer; the last ones again beyond the last."""
        return place if s.is_gated else jnp.minimum(place * CONSUMERS + consumer, last_tile)

    def tiles_of_weights(consumer: int | jax.Array) -> list[tuple[Any, jax.Array]]:
        """For each weight whether it has the consumer's tile, and that tile in it or any other."""
        tile, found, first_tile = tile_of(consumer), [], 0
        if s.is_gated:
            return [(consumer == which, tile) for which in range(len(s.tiles))]
        for count in s.tiles:
            inside = tile - first_tile
            owns = (inside >= 0) & (inside < count)
            found.append((owns, jnp.clip(inside, 0, count - 1)))
            first_tile += count
        return found

    @pl.when((num_rows > 0) & (group == CONSUMERS))
    def _produce():
        if columns > 64:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def fetch_weight(which: int, tile: Any, block: Any, slot: Any, consumer: int) -> None:
            codes, scales = inputs.codes[which], inputs.scales[which]
            target, ready = scratch.codes_smem.at[slot, consumer], scratch.ready.at[slot]
            if s.is_mxfp4:
                run = weight, tile, pl.ds(block, tiling.blocks)
                plgpu.copy_gmem_to_smem(codes.at[run], target, ready)
                target = scratch.words_smem.at[slot, consumer]
                plgpu.copy_gmem_to_smem(scales.at[run], target, ready)
                return
            for b in range(tiling.blocks):
                inner = pl.ds((block + b) * INPUTS, INPUTS)
                source = codes.at[weight, pl.ds(tile * ROWS, ROWS), inner]
                plgpu.copy_gmem_to_smem(source, target.at[b], ready)

        def fetch(turn: jax.Array, _: None) -> None:
            slot = lax.rem(turn, tiling.stages)

            @pl.when(turn >= tiling.stages)
            def _():
                plgpu.barrier_wait(scratch.free.at[slot])

            ready = scratch.ready.at[slot]
            block = first_block + turn * tiling.blocks
            for consumer in range(CONSUMERS):
                for which, (owns, tile) in enumerate(tiles_of_weights(consumer)):
                    copy = functools.partial(fetch_weight, which, tile, block, slot, consumer)
                    if len(s.tiles) == 1 or owns is True:
                        copy()
                    elif owns is not False:
                        pl.when(owns)(copy)
            for part in range(s.num_parts):
                for b in range(tiling.blocks):
                    inner = pl.ds((block + b) * INPUTS, INPUTS)
                    source = inputs.rows.codes.at[part, pl.ds(first, columns), inner]
                    target = scratch.rows_smem.at[slot, part, b]
                    plgpu.copy_gmem_to_smem(source, target, ready)
                width = pl.ds(first, scale_columns(columns))
                source = inputs.rows.scale.at[part, pl.ds(block, tiling.blocks), width]
                plgpu.copy_gmem_to_smem(source, scratch.scales_smem.at[slot, part], ready)

        lax.fori_loop(0, turns, fetch, None)

    @pl.when((num_rows > 0) & (group < CONSUMERS))
    def _consume():
        if columns > 64:
            plgpu.set_max_registers(REGISTERS[0], action="increase")

        def scale_of_tile(block: jax.Array) -> jax.Array:
            """f32[]: FP8's, of 128 outputs; asked for a turn ahead."""
            block = jnp.minimum(block, s.num_blocks - 1)
            found = jnp.float32(0)
            for scales, (owns, tile) in zip(inputs.scales, tiles_of_weights(group), strict=True):
                value = scales[weight, lax.div(tile, INPUTS // ROWS), block]
                if value.dtype != jnp.float32:
                    value = lax.bitcast_convert_type(value.astype(jnp.int32) << 23, jnp.float32)
                found = value if len(s.tiles) == 1 else jnp.where(owns, value, found)
            return found

        def multiply(slot: jax.Array, b: int) -> list[jax.Array]:
            """f32[64, columns] for each part of x, scaled by row."""
            parts = [scratch.rows_smem.at[slot, part, b] for part in range(s.num_parts)]
            codes = scratch.codes_smem.at[slot, group, b]
            if not s.is_mxfp4:
                return [mosaic.multiply([(codes, x.transpose((1, 0)))]) for x in parts]
            loaded = plgpu.load(codes, layout=mosaic.EVEN_ROWS, optimized=False)
            words = plgpu.load(
                scratch.words_smem.at[slot, group, b], layout=mosaic.ROW, optimized=False
            )
            unpacked = unpack_mxfp4.unpack(loaded, words, inputs.magnitudes)
            operand = left_operand.from_rows(unpacked, mosaic.WIDE_ROWS)
            largest = unpack_mxfp4.largest_scale(words) << 23
            factor = lax.bitcast_convert_type(largest, jnp.float32)
            factor = left_operand.to_operand(factor * (1 / unpack_mxfp4.HEADROOM))
            factor = lax.broadcast_in_dim(factor, (ROWS, columns), [0])
            return [mosaic.multiply_registers(operand, x) * factor for x in parts]

        def add_stage(
            turn: jax.Array, carry: tuple[jax.Array, list[jax.Array]]
        ) -> tuple[jax.Array, list[jax.Array]]:
            total, tile_scales = carry
            slot = lax.rem(turn, tiling.stages)
            plgpu.barrier_wait(scratch.ready.at[slot])
            next_block = first_block + (turn + 1) * tiling.blocks
            next_scales = tile_scales
            if not s.is_mxfp4:
                next_scales = [scale_of_tile(next_block + b) for b in range(tiling.blocks)]
            for b in range(tiling.blocks):
                for part, product in enumerate(multiply(slot, b)):
                    scale = plgpu.load(
                        scratch.scales_smem.at[slot, part, b, pl.ds(0, columns)],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                    if not s.is_mxfp4:
                        scale = scale * tile_scales[b]
                    total = total + product * lax.broadcast_in_dim(scale, product.shape, [1])
            if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
                plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.free.at[slot])
            return total, next_scales

        scales = []
        if not s.is_mxfp4:
            scales = [scale_of_tile(first_block + b) for b in range(tiling.blocks)]
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)
        total, _ = lax.fori_loop(0, turns, add_stage, (zeros, scales))

        def store(values: jax.Array) -> None:
            store_transposed(
                out_gmem.at[split],
                values.astype(out_gmem.dtype),
                first_row=target_row,
                num_rows=num_rows,
                first_column=tile_of(group) * ROWS,
                operand_order=s.is_mxfp4,
            )

        if swiglu is None:

            @pl.when(place * CONSUMERS + group <= last_tile)
            def _():
                store(total)

            return
        limit = swiglu.limit
        total = total.astype(swiglu.dtype).astype(jnp.float32)

        @pl.when(group == 1)
        def _():
            up = jnp.clip(total, -limit, limit)
            exchange.store(scratch.up_smem, up)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.up_ready)

        @pl.when(group == 0)
        def _():
            gate = jnp.minimum(total, limit)
            gate = gate / (1 + jnp.exp(-gate))
            if inputs.share is not None:
                share = plgpu.load(
                    inputs.share.at[pl.ds(first, columns)],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                )
                gate = gate * lax.broadcast_in_dim(share, gate.shape, [1])
            plgpu.barrier_wait(scratch.up_ready)
            store(gate * exchange.load(scratch.up_smem, total.shape))


def multiply_items(
    rows: Rows,
    weights: Sequence[QuantizedWeight],
    items: Items | EvenItems,
    *,
    shapes: Shapes,
    tiling: Tiling,
    num_rows: int,
    swiglu: SwiGLU | None = None,
    share: jax.Array | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Multiplies rows with weights of a stack, item by item.

    Args:
      rows: of R rows, `max(columns, 32)` of them beyond the last that an item names.
      weights: stacks [E, out, in] of one format, with the same inputs.
      items: what is multiplied; no row is in two.
      shapes: sizes of the call.
      tiling: how it is cut.
      num_rows: rows of the result.
      swiglu: what follows a gate and an up projection; None elsewhere.
      share: f32[R], factor of each row after SwiGLU; None is 1.
      dtype: of the result.

    Returns:
      [S, num_rows, out], sums of each split; arbitrary in rows of no item. The outputs of several
      weights follow each other, all of which but the last's must be multiples of 64.
    """
    columns = tiling.columns
    per_stage = tiling.stages, CONSUMERS, tiling.blocks
    is_mxfp4 = isinstance(weights[0], MXFP4)
    swizzled = functools.partial(
        plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES
    )
    copies = CONSUMERS * (2 if is_mxfp4 else tiling.blocks)
    copies += shapes.num_parts * (tiling.blocks + 1)
    parts = tiling.stages, shapes.num_parts, tiling.blocks
    scratch = Scratch(
        codes_smem=(
            plgpu.SMEM((*per_stage, ROWS, INPUTS // 2), jnp.uint8)
            if is_mxfp4
            else swizzled((*per_stage, ROWS, INPUTS))
        ),
        words_smem=plgpu.SMEM((*per_stage, ROWS), jnp.int32) if is_mxfp4 else None,
        rows_smem=swizzled((*parts, columns, INPUTS)),
        scales_smem=plgpu.SMEM((*parts, scale_columns(columns)), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiling.stages),
        up_smem=plgpu.SMEM((ROWS * columns,), jnp.float32) if swiglu else None,
        up_ready=plgpu.Barrier() if swiglu else None,
    )

    even = items if isinstance(items, EvenItems) else None
    out = weights[0].shape[-2] if swiglu else sum(weight.shape[-2] for weight in weights)

    def product_kernel(inputs: Operands, out_gmem: Any, scratch: Scratch) -> None:
        _kernel(inputs, out_gmem, scratch, shapes=shapes, tiling=tiling, even=even, swiglu=swiglu)

    return plgpu.kernel(
        product_kernel,
        out_type=jax.ShapeDtypeStruct((tiling.splits, num_rows, out), dtype),
        grid=(tiling.splits, items.count(columns), shapes.num_ctas),
        grid_names=("split", "item", "out"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        Operands(
            items=items if isinstance(items, Items) else None,
            rows=rows,
            codes=[weight.codes for weight in weights],
            scales=[weight.scale for weight in weights],
            magnitudes=jnp.asarray(unpack_mxfp4.magnitude_bytes()),
            share=share,
        )
    )
