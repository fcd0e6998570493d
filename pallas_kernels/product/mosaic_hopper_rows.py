"""Products of many rows with FP8 weights on Hopper, rows on the left: what its two consumers do.

Consumer g has 64 rows of x, the left operand of a product whose right one is both tiles of the
weights:

    [64, 128] = rows tiles^T, f32, per group of inputs
    sum += product * scale of the row * scale of the tile

A thread's sums lie in two rows, so that it has two scales of rows for each group. With the weights
on the left it has one for every two sums, and loading and multiplying those keeps its warp longer
than the tensor core is busy. A gate and an up projection are the two tiles, and a thread has both
values of what it multiplies.

A consumer begins a product before it adds the last one, so that the tensor core has the next one
when it ends. It does so within `_TURNS` stages: the compiler lets products run one at a time where
one lasts from one round of a loop to the next.

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
from pallas_kernels.common.weights import ROWS
from pallas_kernels.product import wgmma
from pallas_kernels.product.call_shapes import CONSUMERS
from pallas_kernels.product.store_rows import store_rows
from pallas_kernels.product.store_transposed import Place
from pallas_kernels.product.work import SwiGLU, Work

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA
_TURNS = 4
"""Stages of a round of the loop."""


def consume(work: Work, outputs: list[Any], swiglu: SwiGLU | None) -> None:
    """Multiplies stage after stage, and stores the sums."""
    totals = _add_up(work)
    if swiglu is None:
        for consumer, total in enumerate(totals):
            _store(work, outputs, total, consumer)
        return
    gate, up = (total.astype(swiglu.dtype).astype(jnp.float32) for total in totals)
    first = work.tile.first + work.group * ROWS
    activated = work.activate(gate, swiglu.limit, first, _LAYOUT, axis=0)
    _store(work, outputs, activated * jnp.clip(up, -swiglu.limit, swiglu.limit), 0)


class _Begun(NamedTuple):
    """A product that runs, of a part of x in a stage.

    Attributes:
      turn: i32[], the stage.
      part: the part of x.
      products: f32[64, 64] of each tile, as `wgmma.begin` returns them.
      row_scale: f32[64], of each row.
      tile_scales: f32[] of each tile.
    """

    turn: jax.Array
    part: int
    products: list[jax.Array]
    row_scale: jax.Array
    tile_scales: list[jax.Array]


def _add_up(work: Work) -> list[jax.Array]:
    """f32[64 rows, 64 outputs] of both tiles."""
    num_parts = work.shapes.num_parts
    turns = math.gcd(work.turns, _TURNS)

    def add_turns(number: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        begun = None
        for ahead in range(turns):
            for part in range(num_parts):
                last, begun = begun, _begin(work, number * turns + ahead, part)
                if last is not None:
                    totals = _add(work, totals, last, in_flight=1)
        assert begun is not None
        return _add(work, totals, begun, in_flight=0)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, ROWS), jnp.float32), _LAYOUT)
    return lax.fori_loop(0, work.turns // turns, add_turns, [zeros] * CONSUMERS)


def _begin(work: Work, turn: jax.Array, part: int) -> _Begun:
    slot, first = work.slot_of(turn), work.group * ROWS
    if part == 0:
        plgpu.barrier_wait(work.scratch.ready.at[slot])
    rows = work.rows_of(turn, 0, part).at[pl.ds(first, ROWS)]
    products = wgmma.begin(rows, work.scratch.codes_smem.at[slot], [ROWS] * CONSUMERS)
    scales = work.row_scales(turn, 0, part, first, ROWS)
    row_scale = plgpu.load(scales, layout=_LAYOUT.reduce(1), optimized=False)
    block = work.block_of(turn)
    tile_scales = [work.scale_of_tile(tile, block) for tile in range(CONSUMERS)]
    return _Begun(turn, part, products, row_scale, tile_scales)


def _add(work: Work, totals: list[jax.Array], begun: _Begun, *, in_flight: int) -> list[jax.Array]:
    """Adds a product, and gives its stage back to the producer after the last part of x."""
    products = wgmma.finish(begun.products, in_flight=in_flight)
    if begun.part == work.shapes.num_parts - 1:
        if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
            plgpu.commit_smem()
        plgpu.barrier_arrive(work.scratch.free.at[work.slot_of(begun.turn)])
    scales = [begun.row_scale * scale for scale in begun.tile_scales]
    return [
        wgmma.settle(total + product * lax.broadcast_in_dim(scale, product.shape, [0]))
        for total, product, scale in zip(totals, products, scales, strict=True)
    ]


def _store(work: Work, outputs: list[Any], values: jax.Array, consumer: int) -> None:
    """The outputs of a tile, the first or the second, for this consumer's rows."""
    first = work.group * ROWS
    row, num_rows = work.tile.target_row + first, work.tile.num_rows - first

    def store_tile(out_gmem: Any, tile: jax.Array) -> None:
        place = Place(row, num_rows, tile * ROWS)
        store_rows(out_gmem.at[work.tile.split], values.astype(out_gmem.dtype), place)

    if work.shapes.is_gated:
        store_tile(outputs[0], work.tile.place)
        return
    exists = work.tile.place * CONSUMERS + consumer <= work.last_tile
    if len(outputs) == 1:
        pl.when(exists)(functools.partial(store_tile, outputs[0], work.tile_of(consumer)))
        return
    for out_gmem, (owns, tile) in zip(outputs, work.tiles_of_weights(consumer), strict=True):
        pl.when(exists & owns)(functools.partial(store_tile, out_gmem, tile))
