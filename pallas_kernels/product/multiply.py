"""Products of rows with weights through Mosaic GPU: from arrays to the launch, and what a CTA does.

    multiply_rows, swiglu_rows    plan the call, bring x into the form that the weights take
    launch                        one kernel: a CTA has a tile, or persistent CTAs go through tiles
      producer                    one warpgroup copies operands in bulk, stages ahead
      mainloop, epilogue          two warpgroups multiply, then store; a module for each form

Weights are the side of an instruction that has 64 or 128 rows, x the side that may have as few as
8. Rows of x that are not rounded come as two terms, each E4M3, that add up; dense weights take them
in bf16. A list of items says which weight of a stack multiplies which rows, so that grouped
products and experts are the same kernel. CTAs form no cluster: x by multicast gained 1 % at best.
Bytes bound the kernel up to some 64 rows of x: those of the weights, once.
Measurements and roads not taken: docs/kernels/block_linear.md.
Source: deepseek_v4.md sections 1.5 and 4.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.typing import DTypeLike

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.pending import (
    ByGroup,
    ByToken,
    Pending,
    Unnormed,
    finish,
)
from pallas_kernels.common.swiglu import swiglu as swiglu_of
from pallas_kernels.common.weights import ROWS, Weight
from pallas_kernels.product import (
    decoded,
    mosaic_blackwell,
    mosaic_hopper,
    mosaic_hopper_rows,
    producer,
)
from pallas_kernels.product.call_shapes import Shapes, shapes_of
from pallas_kernels.product.choose_tiling import choose_tiling, cuts_rows, plan
from pallas_kernels.product.operands import Operands, Product, SwiGLU
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.results import normed, take_apart
from pallas_kernels.product.scratch import Scratch, scratch_types
from pallas_kernels.product.store_transposed import Place, store_transposed
from pallas_kernels.product.tile_scheduler import Tile, TileScheduler
from pallas_kernels.product.tiling import (
    CONSUMERS,
    WARPGROUP_N,
    TensorCore,
    Tiling,
    scale_rows,
)
from pallas_kernels.product.triton_rows import Rows, make_rows, padded
from pallas_kernels.product.work import Work
from pallas_kernels.product.work_list import EvenItems, PickedItems

plgpu: Any = mosaic_gpu
REGISTERS = (232, 40)
"""Registers of a consumer's thread and a producer's; 2 + 1 warpgroups share 3 * 168."""
_FEW_ROWS = 64
_MOST_ADDED_ROWS = 2
"""Rows whose parts each CTA adds up; of more, as each reads all of them, XLA does."""


def multiply_rows(
    x: jax.Array | Pending,
    weights: Sequence[Weight],
    *,
    norms: Sequence[jax.Array | None] = (),
    eps: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    in_parts: bool = False,
    tiling: Tiling | None = None,
    core: TensorCore | None = None,
) -> list[Any]:
    """[T, in] times [out, in] -> [T, out] for each weight; or [G, T, in], [G, out, in] likewise.

    See `block_linear.op.block_linears`; `tiling` and `core` are for tests and measurements.
    """
    is_stack = x.ndim == 3
    if not is_stack:
        assert not isinstance(x, ByToken), "which is of a stack"
        x, weights = x.reshape(1, *x.shape), list(map(_stack, weights))
    # A call that names a tiling or a core asks for the kernel; only one that names neither may be
    # XLA's.
    if tiling is None and core is None and decoded.suits(weights, x):
        results = [decoded.multiply(x, weight, dtype=dtype) for weight in weights]
        results = normed(results, norms, eps)
    else:
        num_weights, num_rows, _ = x.shape
        shapes, tiling = plan(
            weights,
            x.dtype,
            num_rows=num_rows,
            num_weights=num_weights,
            may_split=True,
            tiling=tiling,
            core=core,
        )
        # Sums of splits stay in f32, and whoever adds them up rounds once. A result that is whole
        # is rounded by the kernel.
        is_split, is_normed = tiling.split_k > 1, any(norm is not None for norm in norms)
        # Else XLA would copy a slice of the joined result for each weight.
        apart = len(weights) > 1 and not (is_split or is_normed or shapes.core.has_tmem)
        sums = launch(
            _product_of(x, weights, shapes, tiling),
            num_rows=num_weights * num_rows,
            dtype=jnp.dtype(jnp.float32 if is_split else dtype),
            apart=apart,
        )
        if apart:
            results = [result.reshape(num_weights, num_rows, -1) for result in sums]
        else:
            widths = [weight.shape[-2] for weight in weights]
            results = take_apart(
                sums, x, widths, norms=norms, eps=eps, dtype=dtype, in_parts=in_parts
            )
    return results if is_stack else [result.reshape(*result.shape[1:]) for result in results]


def swiglu_rows(
    x: jax.Array,
    gate: Weight,
    up: Weight,
    *,
    limit: float,
    tiling: Tiling | None = None,
    core: TensorCore | None = None,
    rows: Rows | None = None,
) -> jax.Array:
    """[T, in], [out, in] twice -> [T, out]; see `block_linear.op.swiglu_linear`.

    SwiGLU is the epilogue of the product, except of few rows whose tiles would leave SMs idle
    (`cuts_rows`): their inputs are split, so that all SMs read, and SwiGLU is XLA's. `rows` are
    many, which `make_rows` has made of x, with as many to spare as a tile has.
    """
    weights = [_stack(gate), _stack(up)]
    shapes = shapes_of(*weights, is_gated=True, core=core)
    splits = x.shape[0] <= _FEW_ROWS and not cuts_rows(shapes, x.shape[0])
    if tiling is None and splits and gate.shape[-2] % ROWS == 0:
        gated, raised = multiply_rows(x[None], weights, dtype=x.dtype, core=core)
        return swiglu_of(gated[0], raised[0], limit).astype(x.dtype)
    tiling = tiling or choose_tiling(shapes, x.shape[0], 1, may_split=False)
    product = _product_of(x[None], weights, shapes, tiling, SwiGLU(limit, x.dtype), rows)
    return launch(product, num_rows=x.shape[0], dtype=x.dtype)[0]


def _stack(weight: Weight) -> Weight:
    return jax.tree.map(lambda leaf: leaf[None], weight)


def _product_of(
    x: jax.Array | Pending,
    weights: Sequence[Weight],
    shapes: Shapes,
    tiling: Tiling,
    swiglu: SwiGLU | None = None,
    rows: Rows | RawRows | None = None,
) -> Product:
    """Each weight of a stack times its rows, x as these weights take it."""
    num_weights, num_rows, dim = x.shape
    spread = num_rows
    if shapes.rounds_rows:
        is_added = isinstance(x, ByGroup) and num_rows > _MOST_ADDED_ROWS
        rows = RawRows.of(finish(x) if is_added else x)
    elif rows is None:
        # Bulk copies take eight rows together, so that the rows of each weight of a stack begin at
        # a multiple of eight.
        spread = padded(num_rows) if num_weights > 1 else num_rows
        is_plain = shapes.is_dense or isinstance(x, Unnormed)
        rows = make_rows(
            finish(x).reshape(-1, dim) if is_plain else RawRows.of(x),
            weights[0],
            num_spare=scale_rows(tiling.tile_m),
            num_runs=num_weights,
        )
    items = EvenItems(num_weights, num_rows, spread)
    return Product(rows, weights, items, shapes, tiling, swiglu)


@functools.partial(jax.jit, static_argnames=("num_rows", "dtype", "apart"))
def launch(
    *products: Product,
    num_rows: int,
    dtype: jnp.dtype = jnp.dtype(jnp.float32),  # noqa: B008
    apart: bool = False,
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
    _check_tilings(products)
    first, tiling = products[0], products[0].tiling

    def run_cta(
        product: Product,
        inputs: Operands,
        outputs: list[Any],
        scratch: Scratch,
        item: jax.Array | None = None,
    ) -> None:
        """What one warpgroup of a CTA does for a product: a tile of an item, or many tiles."""
        scheduler = product.scheduler(inputs)
        work_of = functools.partial(
            Work.of, inputs, scratch, product.shapes, product.tiling, product.most_rows
        )
        if item is None:
            _run_persistent(scheduler, work_of, outputs, product.swiglu)
            return
        work = work_of(scheduler.own_tile(item))

        # Warpgroups take roles: from here on they meet at barriers of stages alone.
        @pl.when((work.tile.num_rows > 0) & (work.warpgroup == CONSUMERS))
        def _produce():
            _share_registers(tiling, is_consumer=False)
            producer.fill_stages(work)

        @pl.when((work.tile.num_rows > 0) & (work.warpgroup < CONSUMERS))
        def _consume():
            _share_registers(tiling, is_consumer=True)
            body = _body_of(work)
            body.epilogue(work, body.mainloop(work), outputs, product.swiglu)

        if product.swiglu is None and isinstance(work.inputs.items, PickedItems):
            pl.when((work.tile.num_rows == 0) & (work.warpgroup < CONSUMERS))(
                functools.partial(_store_zeros, work, outputs[0])
            )

    def product_kernel(inputs: list[Operands], *refs: Any) -> None:
        if len(products) == 1:
            *outputs, scratch = refs
            item = None if tiling.persistent else lax.axis_index("item")
            run_cta(first, inputs[0], outputs, scratch, item)
            return
        # Items are numbered through all products; a CTA allocates for the one that has its item.
        item = lax.axis_index("item")
        for product, operands in zip(products, inputs, strict=True):
            run = functools.partial(run_cta, product, operands, list(refs), item=item)
            scoped = functools.partial(
                pl.run_scoped,
                run,
                scratch_types(product.shapes, product.tiling),
                collective_axes="warpgroup",
            )
            pl.when((item >= 0) & (item < product.num_items))(scoped)
            # Behind the product that has the item this is negative, so that no other one takes it.
            item = item - product.num_items

    product_kernel.__name__ = "_".join(["multiply", *(product.name for product in products)])
    results = plgpu.kernel(
        product_kernel,
        out_type=[
            jax.ShapeDtypeStruct((tiling.split_k, num_rows, width), dtype)
            for width in _result_widths(first, apart=apart)
        ],
        **_grid_of(products),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[scratch_types(first.shapes, tiling)] if len(products) == 1 else [],
        # Layouts are spelt out, since threads exchange registers by them (`exchange`).
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )([product.operands() for product in products])
    return results if apart else results[0]


def _check_tilings(products: Sequence[Product]) -> None:
    """Asserts what kernels rely on."""
    for product in products:
        # Mainloops have no masks along k: all splits have equally many stages, and all of them
        # whole.
        cut = product.shapes.groups_of_stage(product.tiling) * product.tiling.split_k
        assert product.shapes.k_groups % cut == 0, "inputs would be left out"
    # Persistent CTAs number the tiles of one product, and Hopper's mainloops alone count the
    # k_iters of a CTA through all of its tiles (`Work.since_launch`).
    first = products[0]
    is_alone = len(products) == 1 and not first.shapes.core.has_tmem
    assert is_alone or not first.tiling.persistent


def _result_widths(product: Product, *, apart: bool) -> list[int]:
    """Outputs of each array of results.

    Those of all weights lie side by side in one array, unless they are apart; a gate and an up
    projection make one result, as wide as either of them.
    """
    widths = [weight.shape[-2] for weight in product.weights]
    if apart:
        return widths
    return widths[:1] if product.swiglu else [sum(widths)]


def _grid_of(products: Sequence[Product]) -> dict[str, Any]:
    """The CTAs of a launch: one for each split, item and tile of outputs, or persistent ones."""
    first, tiling = products[0], products[0].tiling
    if tiling.persistent:
        return {"grid": (first.scheduler().num_ctas,), "grid_names": ("cta",)}
    num_items = sum(product.num_items for product in products)
    return {
        "grid": (tiling.split_k, num_items, first.shapes.tiles_n),
        "grid_names": ("split", "item", "n"),
    }


def _body_of(work: Work) -> Any:
    """The module that multiplies, by its `mainloop` and `epilogue`."""
    if work.shapes.core.has_tmem:
        return mosaic_blackwell
    return mosaic_hopper if work.tiling.swap_ab else mosaic_hopper_rows


def _share_registers(tiling: Tiling, *, is_consumer: bool) -> None:
    """Gives consumers of wide tiles the registers that the producer does not need."""
    if tiling.tile_m <= 64:
        return
    if is_consumer:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
    else:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")


def _run_persistent(
    scheduler: TileScheduler,
    work_of: Callable[..., Work],
    outputs: list[Any],
    swiglu: SwiGLU | None,
) -> None:
    """A CTA that goes through tiles: the next ones are brought in while one is stored."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _produce():
        _share_registers(scheduler.tiling, is_consumer=False)

        def produce(tile: Tile, before: jax.Array) -> None:
            pl.when(tile.num_rows > 0)(
                functools.partial(producer.fill_stages, work_of(tile, before))
            )

        # The producer runs ahead of the consumers, into the next tile, as far as stages are empty.
        k_iters = scheduler.go_through(produce)
        if interpreting():
            work = work_of(scheduler.tile_of(jnp.int32(0)), k_iters)
            producer.await_empty(work, k_iters)

    @pl.when(warpgroup < CONSUMERS)
    def _consume():
        _share_registers(scheduler.tiling, is_consumer=True)

        def consume(tile: Tile, before: jax.Array) -> None:
            work = work_of(tile, before)
            body = _body_of(work)

            @pl.when(tile.num_rows > 0)
            def _():
                body.epilogue(work, body.mainloop(work), outputs, swiglu)

        scheduler.go_through(consume)


def _store_zeros(work: Work, out_gmem: Any) -> None:
    """The consumer's outputs of an item that names no weight.

    Other items without rows leave their part of the result arbitrary, and nobody reads it. A picked
    one has a row of its own there, which is added to the others' of its token.
    """
    zeros = jnp.zeros((WARPGROUP_N, work.tiling.tile_m), out_gmem.dtype)
    store_transposed(
        out_gmem.at[work.tile.split],
        plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),  # as a product lies, which this takes
        Place(work.tile.target_row, jnp.int32(1), work.warpgroup_tile(work.warpgroup) * ROWS),
        operand_order=False,
    )
