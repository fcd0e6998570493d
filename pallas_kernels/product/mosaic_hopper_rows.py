"""Products of many rows with FP8 weights on Hopper, rows on the left: what its two consumers do.

Consumer g has 64 rows of x, the left operand of a product whose right one is both tiles of the
weights:

    [64, 128] = rows tiles^T, f32, per group of inputs
    accumulator += product * scale of the row * scale of the tile

A thread's sums lie in two rows, so that it has two scales of rows for each group. With the weights
on the left it has one for every two sums, and loading and multiplying those keeps its warp longer
than the tensor core is busy. A gate and an up projection are the two tiles, and a thread has both
values of what it multiplies.

A consumer begins a product before it adds the last one, so that the tensor core has the next one
when it ends. It does so within `_K_ITERS` stages: the compiler lets products run one at a time
where one lasts from one round of a loop to the next.

Sums of the FP8 tensor core keep some 14 bits below their largest term, over 128 inputs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.product import wgmma
from pallas_kernels.product.operands import SwiGLU
from pallas_kernels.product.store_rows import store_rows
from pallas_kernels.product.store_transposed import Place
from pallas_kernels.product.tiling import CONSUMERS, ROWS_ON_LEFT, WARPGROUP_N
from pallas_kernels.product.work import Work

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA
_HEIGHT = ROWS_ON_LEFT // CONSUMERS
"""Rows of x of a consumer."""
_K_ITERS = 4
"""Of a round of the loop."""


def mainloop(work: Work) -> list[jax.Array]:
    """Multiplies stage after stage: f32[64 rows, 64 outputs] of both tiles."""
    num_terms = work.shapes.num_terms
    k_iters = math.gcd(work.k_iters, _K_ITERS)

    def add_stages(number: jax.Array, accumulators: list[jax.Array]) -> list[jax.Array]:
        begun = None  # no product runs from one round into the next
        for ahead in range(k_iters):
            for term in range(num_terms):
                last, begun = begun, _begin(work, number * k_iters + ahead, term)
                if last is not None:
                    accumulators = _add(work, accumulators, last, in_flight=1)
        assert begun is not None
        return _add(work, accumulators, begun, in_flight=0)  # the last of the round runs alone

    # In the layout of products, which are then added where they come out.
    zeros = plgpu.layout_cast(jnp.zeros((_HEIGHT, WARPGROUP_N), jnp.float32), _LAYOUT)
    return lax.fori_loop(0, work.k_iters // k_iters, add_stages, [zeros] * CONSUMERS)


def epilogue(
    work: Work, accumulators: list[jax.Array], outputs: list[Any], swiglu: SwiGLU | None
) -> None:
    """Stores the outputs of both tiles, or SwiGLU of the two."""
    if swiglu is None:
        for consumer, accumulator in enumerate(accumulators):
            _store(work, outputs, accumulator, consumer)
        return
    # Both tiles have the same rows in the same threads: nothing is exchanged.
    gate, up = (a.astype(swiglu.dtype).astype(jnp.float32) for a in accumulators)
    first = work.tile.first_row + work.warpgroup * _HEIGHT
    activated = work.activate(gate, swiglu.limit, first, _LAYOUT, axis=0)
    _store(work, outputs, activated * jnp.clip(up, -swiglu.limit, swiglu.limit), 0)


class _Begun(NamedTuple):
    """A product that runs, of a term of x in a stage.

    Attributes:
      k_iter: i32[], whose stage it is.
      term: the term of x.
      products: f32[64, 64] of each tile, as `wgmma.begin` returns them.
      row_scale: f32[64], of each row.
      tile_scales: f32[] of each tile.
    """

    k_iter: jax.Array
    term: int
    products: list[jax.Array]
    row_scale: jax.Array
    tile_scales: list[jax.Array]


def _begin(work: Work, k_iter: jax.Array, term: int) -> _Begun:
    stage, first = work.stage_of(k_iter), work.warpgroup * _HEIGHT
    if term == 0:  # from here on the stage is the consumers': all copies into it have arrived
        plgpu.barrier_wait(work.scratch.full.at[stage])
    rows = work.rows_of(k_iter, 0, term).at[pl.ds(first, _HEIGHT)]  # e4m3[64, 128]
    tiles = work.scratch.codes_smem.at[stage]  # e4m3[2, 1, 64, 128]
    products = wgmma.begin(rows, tiles, [WARPGROUP_N] * CONSUMERS)
    scales = work.row_scales(k_iter, 0, term, first, _HEIGHT)
    # Rows of x are rows of a product: a thread loads the scales of its two.
    row_scale = plgpu.load(scales, layout=_LAYOUT.reduce(1), optimized=False)
    group = work.group_of(k_iter)
    tile_scales = [work.scale_of_tile(tile, group) for tile in range(CONSUMERS)]
    return _Begun(k_iter, term, products, row_scale, tile_scales)


def _add(
    work: Work, accumulators: list[jax.Array], begun: _Begun, *, in_flight: int
) -> list[jax.Array]:
    """Adds a product, and gives its stage back to the producer after the last term of x."""
    products = wgmma.finish(begun.products, in_flight=in_flight)
    if begun.term == work.shapes.num_terms - 1:
        # The last product that reads the stage has ended, and its scales are in registers: the
        # producer's again, once both consumers are here.
        if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
            plgpu.commit_smem()
        plgpu.barrier_arrive(work.scratch.empty.at[work.stage_of(begun.k_iter)])
    scales = [begun.row_scale * scale for scale in begun.tile_scales]
    return [
        wgmma.settle(total + product * lax.broadcast_in_dim(scale, product.shape, [0]))
        for total, product, scale in zip(accumulators, products, scales, strict=True)
    ]


def _store(work: Work, outputs: list[Any], values: jax.Array, consumer: int) -> None:
    """The outputs of a tile, the first or the second, for this consumer's rows."""
    first = work.warpgroup * _HEIGHT
    row, num_rows = work.tile.target_row + first, work.tile.num_rows - first

    def store_tile(out_gmem: Any, tile: jax.Array) -> None:
        place = Place(row, num_rows, tile * WARPGROUP_N)
        store_rows(out_gmem.at[work.tile.split], values.astype(out_gmem.dtype), place)

    if work.shapes.is_gated:
        store_tile(outputs[0], work.tile.n_index)
        return
    exists = work.tile.n_index * CONSUMERS + consumer <= work.last_warpgroup_tile
    if len(outputs) == 1:
        pl.when(exists)(functools.partial(store_tile, outputs[0], work.warpgroup_tile(consumer)))
        return
    for out_gmem, (owns, tile) in zip(outputs, work.tiles_of_weights(consumer), strict=True):
        pl.when(exists & owns)(functools.partial(store_tile, out_gmem, tile))
