"""Products of rows with weights through Mosaic GPU: items of a list, on Hopper and Blackwell.

One CTA: 128 rows of weights, some rows of x, a run of inputs in groups of 128 bytes. Weights are
the side of a product that has 64 or 128 rows, x the side that may have as few as 8. One warpgroup
brings in stages (`work`), two multiply (`mosaic_hopper`, `mosaic_blackwell`); SwiGLU may follow.

Rows of x that are not rounded come as two parts, each E4M3, that add up; dense weights take them in
bf16. A list of items says which weight of a stack multiplies which rows, so that grouped products
and experts are the same kernel. Bytes bound it up to some 64 rows of x: those of the weights, once.
Measurements and roads not taken: docs/kernels/block_linear.md.
Source: deepseek_v4.md sections 1.5 and 4.5.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.block_linear import mosaic_blackwell, mosaic_hopper
from pallas_kernels.block_linear.call_shapes import (
    BUFFERS,
    CONSUMERS,
    Shapes,
    Tiling,
    scale_columns,
)
from pallas_kernels.block_linear.items import EvenItems, Items
from pallas_kernels.block_linear.round_rows import RawRows
from pallas_kernels.block_linear.triton_rows import Rows
from pallas_kernels.block_linear.work import Operands, Scratch, SwiGLU, Work
from pallas_kernels.common.weights import INPUTS, MXFP4, ROWS, BlockFP8, Weight
from pallas_kernels.gpu import mosaic, unpack_mxfp4

plgpu: Any = mosaic_gpu
REGISTERS = (232, 40)
"""Registers of a consumer's thread and a producer's; 2 + 1 warpgroups share 3 * 168."""


def _kernel(work: Work, outputs: list[Any], swiglu: SwiGLU | None) -> None:
    has_many_columns = work.tiling.columns > 64

    @pl.when((work.num_rows > 0) & (work.group == CONSUMERS))
    def _produce():
        if has_many_columns:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        work.produce()

    @pl.when((work.num_rows > 0) & (work.group < CONSUMERS))
    def _consume():
        if has_many_columns:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        kernel = mosaic_blackwell if work.shapes.core.has_memory else mosaic_hopper
        kernel.consume(work, outputs, swiglu)


def _scratch(shapes: Shapes, tiling: Tiling, *, exchanges: bool) -> Scratch:
    columns = tiling.columns
    per_stage = tiling.stages, CONSUMERS, tiling.blocks
    parts = tiling.stages, shapes.num_parts, tiling.blocks
    e4m3 = functools.partial(plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES)
    bf16 = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=mosaic.SWIZZLED)
    operand = bf16 if shapes.is_dense else e4m3
    if shapes.is_mxfp4:
        codes = plgpu.SMEM((*per_stage, ROWS, INPUTS // 2), jnp.uint8)
    elif shapes.joins_tiles:
        codes = operand((tiling.stages, tiling.blocks, CONSUMERS * ROWS, shapes.inputs))
    else:
        codes = operand((*per_stage, ROWS, shapes.inputs))
    copies = CONSUMERS * (2 if shapes.is_mxfp4 else tiling.blocks)
    if shapes.rounds_rows:
        parts = shapes.num_blocks // tiling.splits, shapes.num_parts
    else:
        copies += shapes.num_parts * (tiling.blocks + (not shapes.is_dense))
    scales = plgpu.SMEM((*parts, scale_columns(columns)), jnp.float32)
    has_memory = shapes.core.has_memory
    rows_ready = plgpu.Barrier(num_arrivals=CONSUMERS, orders_tensor_core=has_memory)
    scratch = Scratch(
        codes_smem=codes,
        words_smem=plgpu.SMEM((*per_stage, ROWS), jnp.int32) if shapes.is_mxfp4 else None,
        rows_smem=operand((*parts, columns, shapes.inputs)),
        scales_smem=None if shapes.is_dense else scales,
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiling.stages),
        up_smem=plgpu.SMEM((ROWS * columns,), jnp.float32) if exchanges else None,
        up_ready=plgpu.Barrier() if exchanges and not has_memory else None,
        rows_ready=rows_ready if shapes.rounds_rows else None,
    )
    if not has_memory:
        return scratch
    barrier = functools.partial(plgpu.Barrier, num_barriers=BUFFERS, orders_tensor_core=True)
    height = CONSUMERS * ROWS
    scratch = scratch._replace(
        products_tmem=plgpu.TMEM((height, BUFFERS * shapes.num_parts * columns), jnp.float32),
        products_ready=barrier(),
        products_read=barrier(num_arrivals=CONSUMERS),
    )
    if not shapes.is_mxfp4:
        return scratch
    return scratch._replace(
        unpacked_smem=e4m3((BUFFERS, height, INPUTS)),
        factors_smem=plgpu.SMEM((BUFFERS, height), jnp.float32),
        unpacked=barrier(num_arrivals=CONSUMERS),
    )


def multiply_items(
    rows: Rows | RawRows,
    weights: Sequence[Weight],
    items: Items | EvenItems,
    *,
    shapes: Shapes,
    tiling: Tiling,
    num_rows: int,
    swiglu: SwiGLU | None = None,
    share: jax.Array | None = None,
    dtype: Any = jnp.float32,
    apart: bool = False,
) -> Any:
    """Multiplies rows with weights of a stack, item by item.

    Args:
      rows: of R rows, `max(columns, 32)` of them beyond the last that an item names, if they are
        rounded.
      weights: stacks [E, out, in] of one format, with the same inputs.
      items: what is multiplied; no row is in two.
      shapes: sizes of the call.
      tiling: how it is cut.
      num_rows: rows of the result.
      swiglu: what follows a gate and an up projection; None elsewhere.
      share: f32[R], factor of each row after SwiGLU; None is 1.
      dtype: of the result.
      apart: whether several weights have a result each; on Hopper.

    Returns:
      [S, num_rows, out], sums of each split; arbitrary in rows of no item. The outputs of several
      weights follow each other, all of which but the last's must be multiples of 64.
    """
    assert shapes.num_blocks % (tiling.blocks * tiling.splits) == 0, "inputs would be left out"
    even = items if isinstance(items, EvenItems) else None
    widths = [weight.shape[-2] for weight in weights]
    widths = widths if apart else widths[:1] if swiglu else [sum(widths)]
    quantized = [weight for weight in weights if isinstance(weight, BlockFP8 | MXFP4)]

    limit = rows.limit if isinstance(rows, RawRows) else None
    if isinstance(rows, RawRows):
        rows = rows._replace(limit=None)

    def product_kernel(inputs: Operands, *refs: Any) -> None:
        *outputs, scratch = refs
        if isinstance(inputs.rows, RawRows):
            inputs = inputs._replace(rows=inputs.rows._replace(limit=limit))
        _kernel(Work.find(inputs, scratch, shapes, tiling, even), outputs, swiglu)

    results = plgpu.kernel(
        product_kernel,
        out_type=[jax.ShapeDtypeStruct((tiling.splits, num_rows, n), dtype) for n in widths],
        grid=(tiling.splits, items.count(tiling.columns), shapes.num_ctas),
        grid_names=("split", "item", "out"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch(shapes, tiling, exchanges=swiglu is not None)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        Operands(
            items=items if isinstance(items, Items) else None,
            rows=rows,
            codes=[weight.codes for weight in quantized] or weights,
            scales=[weight.scale for weight in quantized],
            magnitudes=jnp.asarray(unpack_mxfp4.magnitude_bytes()),
            share=share,
        )
    )
    return results if apart else results[0]
