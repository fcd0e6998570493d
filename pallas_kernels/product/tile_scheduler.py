"""The tiles of a product, and which of them a CTA goes through.

A tile is 128 rows of weights, `Tiling.columns` rows of x and a run of inputs. Either each has a
CTA of its own, or as many CTAs as run at once go through all of them, one after the other. Those
take tiles that run at once from a band of `Tiling.band` items, for some 128 outputs each: what they
read of x and of the weights is then small, and in L2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.product.call_shapes import Shapes, Tiling
from pallas_kernels.product.work_list import EvenItems, Items, PickedItems


class Tile(NamedTuple):
    """Which tile it is, and where its rows lie.

    Attributes:
      split: i32[], the run of inputs.
      place: i32[], the place along the outputs.
      weight: i32[], number in the stack.
      first: i32[], first row of x.
      target_row: i32[], row of the result that it becomes.
      num_rows: i32[], rows; 0 where there is nothing to do.
    """

    split: jax.Array
    place: jax.Array
    weight: jax.Array
    first: jax.Array
    target_row: jax.Array
    num_rows: jax.Array


class Tiles(NamedTuple):
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
        return self.items.count(self.tiling.columns)

    @property
    def places(self) -> int:
        """CTAs along the outputs."""
        return self.shapes.num_ctas

    @property
    def total(self) -> int:
        """Tiles in all."""
        return self.tiling.splits * self.num_items * self.places

    @property
    def programs(self) -> int:
        """CTAs that go through the tiles."""
        return min(self.shapes.core.device.num_sms * self.tiling.programs, self.total)

    def own(self, item: jax.Array) -> Tile:
        """That of a CTA which has one alone."""
        split, place = (lax.axis_index(name) for name in ("split", "out"))
        return Tile(split, place, *self.items.of(item, self.tiling.columns))

    def numbered(self, number: jax.Array) -> Tile:
        """The tile of a number; beyond the last one without rows."""
        tiling, inside = self.tiling, jnp.minimum(number, self.total - 1)
        split, inside = _divide(inside, self.num_items * self.places)
        band, inside = _divide(inside, tiling.band * self.places)
        height = jnp.minimum(tiling.band, self.num_items - band * tiling.band)
        place, row = lax.div(inside, height), lax.rem(inside, height)
        found = self.items.of(band * tiling.band + row, tiling.columns)
        weight, first, target_row, num_rows = found
        num_rows = jnp.where(number < self.total, num_rows, 0)
        return Tile(split, place, weight, first, target_row, num_rows)

    def go_through(self, act: Callable[[Tile, jax.Array], None]) -> jax.Array:
        """Calls for each tile of this CTA, with the stages before it; returns those of all.

        What says which tile is next is read while one is worked on.
        """
        program = lax.axis_index("program")
        turns = self.shapes.turns(self.tiling)

        def step(i: jax.Array, carry: tuple[jax.Array, Tile]) -> tuple[jax.Array, Tile]:
            before, tile = carry
            following = self.numbered(program + (i + 1) * self.programs)
            act(tile, before)
            return before + jnp.where(tile.num_rows > 0, turns, 0), following

        start = jnp.int32(0), self.numbered(program)
        turns_of_all, _ = lax.fori_loop(0, -(-self.total // self.programs), step, start)
        return turns_of_all


def _divide(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(number, by), lax.rem(number, by)
