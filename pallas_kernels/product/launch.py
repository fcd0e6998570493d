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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import INPUTS, MXFP4, ROWS, BlockFP8, Weight
from pallas_kernels.gpu import mosaic, unpack_mxfp4
from pallas_kernels.product import mosaic_blackwell, mosaic_hopper, mosaic_hopper_rows
from pallas_kernels.product.call_shapes import (
    BUFFERS,
    CONSUMERS,
    Shapes,
    Tiling,
    scale_columns,
)
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.store_transposed import Place, store_transposed
from pallas_kernels.product.tile_scheduler import Tile, Tiles
from pallas_kernels.product.triton_rows import Rows
from pallas_kernels.product.work import Operands, Scratch, SwiGLU, Work
from pallas_kernels.product.work_list import EvenItems, Items, PickedItems

plgpu: Any = mosaic_gpu
REGISTERS = (232, 40)
"""Registers of a consumer's thread and a producer's; 2 + 1 warpgroups share 3 * 168."""


def _kernel(work: Work, outputs: list[Any], swiglu: SwiGLU | None) -> None:
    has_many_columns = work.tiling.columns > 64

    @pl.when((work.tile.num_rows > 0) & (work.group == CONSUMERS))
    def _produce():
        if has_many_columns:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        work.produce()

    @pl.when((work.tile.num_rows > 0) & (work.group < CONSUMERS))
    def _consume():
        if has_many_columns:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        _consumer_of(work).consume(work, outputs, swiglu)

    if swiglu is None and isinstance(work.inputs.items, PickedItems):
        pl.when((work.tile.num_rows == 0) & (work.group < CONSUMERS))(
            functools.partial(_store_zeros, work, outputs[0])
        )


def _consumer_of(work: Work) -> Any:
    """The module that multiplies."""
    if work.shapes.core.has_memory:
        return mosaic_blackwell
    return mosaic_hopper_rows if work.tiling.rows_on_left else mosaic_hopper


def _kernel_of_tiles(
    tiles: Tiles, work_of: Callable[..., Work], outputs: list[Any], swiglu: SwiGLU | None
) -> None:
    """A CTA that goes through tiles: the next ones are brought in while one is stored."""
    group, tiling = lax.axis_index("warpgroup"), tiles.tiling
    has_many_columns = tiling.columns > 64

    @pl.when(group == CONSUMERS)
    def _produce():
        if has_many_columns:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def produce(tile: Tile, before: jax.Array) -> None:
            pl.when(tile.num_rows > 0)(work_of(tile, before).produce)

        turns = tiles.go_through(produce)
        if interpreting():
            work_of(tiles.numbered(jnp.int32(0)), turns).await_free(turns)

    @pl.when(group < CONSUMERS)
    def _consume():
        if has_many_columns:
            plgpu.set_max_registers(REGISTERS[0], action="increase")

        def consume(tile: Tile, before: jax.Array) -> None:
            work = work_of(tile, before)
            pl.when(tile.num_rows > 0)(
                functools.partial(_consumer_of(work).consume, work, outputs, swiglu)
            )

        tiles.go_through(consume)


def _store_zeros(work: Work, out_gmem: Any) -> None:
    """The consumer's outputs of an item that names no weight."""
    zeros = jnp.zeros((ROWS, work.tiling.columns), out_gmem.dtype)
    store_transposed(
        out_gmem.at[work.tile.split],
        plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
        Place(work.tile.target_row, jnp.int32(1), work.tile_of(work.group) * ROWS),
        operand_order=False,
    )


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
    exchanged = ROWS * (columns if has_memory else tiling.pieces[0][1])
    scratch = Scratch(
        codes_smem=codes,
        words_smem=plgpu.SMEM((*per_stage, ROWS), jnp.int32) if shapes.is_mxfp4 else None,
        rows_smem=operand((*parts, columns, shapes.inputs)),
        scales_smem=None if shapes.is_dense else scales,
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiling.stages),
        up_smem=plgpu.SMEM((exchanged,), jnp.float32) if exchanges else None,
        up_ready=plgpu.Barrier() if exchanges and not has_memory else None,
        rows_ready=rows_ready if shapes.rounds_rows else None,
        up_read=plgpu.Barrier() if exchanges and tiling.exchanges_in_turns else None,
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Product:
    """Rows times weights of a stack, item by item.

    Attributes:
      rows: of R rows, `max(columns, 32)` of them beyond the last that an item names, if they are
        rounded.
      weights: stacks [E, out, in] of one format, with the same inputs.
      items: what is multiplied; no row of the result is in two.
      shapes: sizes of the call; static.
      tiling: how it is cut; static.
      swiglu: what follows a gate and an up projection; None elsewhere; static.
      share: f32[R], factor of each row after SwiGLU, f32[N] of each of `PickedItems`; None is 1.
    """

    rows: Rows | RawRows
    weights: Sequence[Weight]
    items: Items | EvenItems | PickedItems
    shapes: Shapes = dataclasses.field(metadata={"static": True})
    tiling: Tiling = dataclasses.field(metadata={"static": True})
    swiglu: SwiGLU | None = dataclasses.field(default=None, metadata={"static": True})
    share: jax.Array | None = None

    @property
    def num_items(self) -> int:
        """Items in all."""
        return self.items.count(self.tiling.columns)

    @property
    def name(self) -> str:
        """What a profile calls it: format, outputs of the launch and inputs."""
        shapes = self.shapes
        outputs = "x".join(str(tiles * ROWS) for tiles in shapes.tiles)
        return f"{shapes.format}_{outputs}_of_{shapes.num_blocks * shapes.inputs}"

    def operands(self) -> Operands:
        """Arrays that the kernel reads."""
        quantized = [weight for weight in self.weights if isinstance(weight, BlockFP8 | MXFP4)]
        return Operands(
            items=None if isinstance(self.items, EvenItems) else self.items,
            rows=self.rows,
            codes=[weight.codes for weight in quantized] or self.weights,
            scales=[weight.scale for weight in quantized],
            magnitudes=jnp.asarray(unpack_mxfp4.magnitude_bytes()),
            share=self.share,
        )

    def tiles(self, inputs: Operands | None = None) -> Tiles:
        """Its tiles, in the kernel those of the arrays there."""
        items = self.items
        if inputs is not None and inputs.items is not None:
            items = inputs.items
        return Tiles(items, self.shapes, self.tiling)

    def run(
        self, inputs: Operands, outputs: list[Any], scratch: Scratch, item: jax.Array | None
    ) -> None:
        """One CTA's part, as one of its warpgroups; without an item it goes through tiles."""
        most_rows = self.items.most_rows(self.tiling.columns)
        work_of = functools.partial(Work.of, inputs, scratch, self.shapes, self.tiling, most_rows)
        tiles = self.tiles(inputs)
        if item is None:
            _kernel_of_tiles(tiles, work_of, outputs, self.swiglu)
        else:
            _kernel(work_of(tiles.own(item)), outputs, self.swiglu)

    def scratch(self) -> Scratch:
        """What a CTA has to itself."""
        exchanges = self.swiglu is not None and not self.tiling.rows_on_left
        return _scratch(self.shapes, self.tiling, exchanges=exchanges)


def multiply_items(
    *products: Product, num_rows: int, dtype: Any = jnp.float32, apart: bool = False
) -> Any:
    """Runs a product, or several in one launch whose results are rows of one array.

    Launches of equal shapes, such as those of one weight in every layer, are traced and lowered
    once.

    Args:
      *products: of as many outputs and splits each; no row of the result is in two.
      num_rows: rows of the result.
      dtype: of the result.
      apart: whether several weights of the product have a result each; on Hopper.

    Returns:
      [S, num_rows, out], sums of each split; arbitrary in rows of no item. The outputs of several
      weights follow each other, all of which but the last's must be multiples of 64.
    """
    return _multiply(
        *products, num_rows=num_rows, dtype=jnp.dtype(dtype), apart=apart, interprets=interpreting()
    )


@functools.partial(jax.jit, static_argnames=("num_rows", "dtype", "apart", "interprets"))
def _multiply(
    *products: Product, num_rows: int, dtype: jnp.dtype, apart: bool, interprets: bool
) -> Any:
    del interprets  # it decides how this is traced
    for product in products:
        cut = product.tiling.blocks * product.tiling.splits
        assert product.shapes.num_blocks % cut == 0, "inputs would be left out"
    first = products[0]
    widths = [weight.shape[-2] for weight in first.weights]
    widths = widths if apart else widths[:1] if first.swiglu else [sum(widths)]

    tiling = first.tiling
    assert not tiling.programs or (len(products) == 1 and not first.shapes.core.has_memory)

    def product_kernel(inputs: list[Operands], *refs: Any) -> None:
        if len(products) == 1:
            *outputs, scratch = refs
            item = None if tiling.programs else lax.axis_index("item")
            first.run(inputs[0], outputs, scratch, item)
            return
        item = lax.axis_index("item")
        for product, operands in zip(products, inputs, strict=True):
            run = functools.partial(product.run, operands, list(refs), item=item)
            scoped = functools.partial(
                pl.run_scoped, run, product.scratch(), collective_axes="warpgroup"
            )
            pl.when((item >= 0) & (item < product.num_items))(scoped)
            item = item - product.num_items

    product_kernel.__name__ = "_".join(["multiply", *(product.name for product in products)])
    splits = tiling.splits
    grid = {
        "grid": (splits, sum(product.num_items for product in products), first.shapes.num_ctas),
        "grid_names": ("split", "item", "out"),
    }
    if tiling.programs:
        grid = {"grid": (first.tiles().programs,), "grid_names": ("program",)}
    results = plgpu.kernel(
        product_kernel,
        out_type=[jax.ShapeDtypeStruct((splits, num_rows, n), dtype) for n in widths],
        **grid,
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[first.scratch()] if len(products) == 1 else [],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )([product.operands() for product in products])
    return results if apart else results[0]
