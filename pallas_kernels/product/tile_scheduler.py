"""The tiles of a product, and which of them a CTA goes through.

A tile is `TILE_N` outputs, `Tiling.tile_m` rows of x and a run of inputs. Either each has a CTA of
its own, or persistent CTAs, as many as run at once, go through all of them, one after the other.
Those take tiles that run at once from a band of `Tiling.band` items, for some `TILE_N` outputs
each: what they read of x and of the weights is then small, and in L2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.product.call_shapes import Shapes
from pallas_kernels.product.tiling import Tiling
from pallas_kernels.product.work_list import EvenItems, Items, PickedItems


class Tile(NamedTuple):
    """Which tile it is, and where its rows lie.

    Attributes:
      split: i32[], the run of inputs, of `Tiling.split_k`.
      n_index: i32[], its number along the outputs, in units of `TILE_N`.
      weight: i32[], number in the stack.
      first_row: i32[], of x.
      target_row: i32[], row of the result that it becomes.
      num_rows: i32[], rows; 0 where there is nothing to do.
    """

    split: jax.Array
    n_index: jax.Array
    weight: jax.Array
    first_row: jax.Array
    target_row: jax.Array
    num_rows: jax.Array


class TileScheduler(NamedTuple):
    """All tiles of a product, numbered.

    Attributes:
      items: of the product, in the kernel.
      shapes: sizes of the call.
      tiling: how it is cut.
    """

    items: Items | EvenItems | PickedItems
    shapes: Shapes
    tiling: Tiling

    @property
    def num_items(self) -> int:
        """Items in all."""
        return self.items.count(self.tiling.tile_m)

    @property
    def total(self) -> int:
        """Tiles in all."""
        return self.tiling.split_k * self.num_items * self.shapes.tiles_n

    @property
    def num_ctas(self) -> int:
        """Persistent CTAs that go through the tiles."""
        return min(self.shapes.core.device.num_sms * self.tiling.persistent, self.total)

    def own_tile(self, item: jax.Array) -> Tile:
        """That of a CTA which has one alone."""
        split, n_index = (lax.axis_index(name) for name in ("split", "n"))
        return Tile(split, n_index, *self.items.of(item, self.tiling.tile_m))

    def tile_of(self, number: jax.Array) -> Tile:
        """The tile of a number; beyond the last one without rows."""
        tiling, inside = self.tiling, jnp.minimum(number, self.total - 1)
        split, inside = _divide(inside, self.num_items * self.shapes.tiles_n)
        # Items go in bands: within one all items of a tile of outputs follow each other, and find
        # its weights in L2.
        band, inside = _divide(inside, tiling.band * self.shapes.tiles_n)
        # Items of the band, of which the last one may have fewer.
        height = jnp.minimum(tiling.band, self.num_items - band * tiling.band)
        n_index, row = lax.div(inside, height), lax.rem(inside, height)
        item = self.items.of(band * tiling.band + row, tiling.tile_m)
        weight, first_row, target_row, num_rows = item
        num_rows = jnp.where(number < self.total, num_rows, 0)  # none beyond the last
        return Tile(split, n_index, weight, first_row, target_row, num_rows)

    def go_through(self, act: Callable[[Tile, jax.Array], None]) -> jax.Array:
        """Calls for each tile of this CTA, with the k_iters before it; returns those of all.

        What says which tile is next is read while one is worked on.
        """
        cta = lax.axis_index("cta")
        k_iters = self.shapes.k_iters(self.tiling)

        def step(i: jax.Array, carry: tuple[jax.Array, Tile]) -> tuple[jax.Array, Tile]:
            before, tile = carry
            # CTAs take tiles in turns. All warpgroups of one count the same k_iters, and so agree
            # on stages.
            following = self.tile_of(cta + (i + 1) * self.num_ctas)
            act(tile, before)
            return before + jnp.where(tile.num_rows > 0, k_iters, 0), following

        start = jnp.int32(0), self.tile_of(cta)
        k_iters_of_all, _ = lax.fori_loop(0, pl.cdiv(self.total, self.num_ctas), step, start)
        return k_iters_of_all


def _divide(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(number, by), lax.rem(number, by)
