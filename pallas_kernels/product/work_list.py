"""The work list of a product: items, each a weight of a stack and rows that it multiplies.

An item has at most `Tiling.tile_m` rows; with the tiles of outputs it is what a CTA works on.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EvenItems:
    """Items that follow from their number: each weight of a stack multiplies a run of rows.

    Attributes:
      num_weights: weights of the stack.
      num_tokens: rows of a run.
      spread: rows from the beginning of a run to that of the next, in x.
      first: row of x that the first run begins with.
      target: row of the result that the first run begins with.
    """

    num_weights: int
    num_tokens: int
    spread: int
    first: int = 0
    target: int = 0

    def of(self, item: jax.Array, tile_m: int) -> tuple[jax.Array, ...]:
        """The fields of `Items` of one item."""
        tiles = self.count(tile_m) // self.num_weights
        weight = lax.div(item, tiles)
        inside = lax.rem(item, tiles) * tile_m  # rows of the run before the tile
        # The last tile of a run may have fewer rows.
        num_rows = jnp.minimum(self.num_tokens - inside, tile_m)
        first = self.first + weight * self.spread + inside
        return weight, first, self.target + weight * self.num_tokens + inside, num_rows

    def count(self, tile_m: int) -> int:
        """Items in all."""
        return self.num_weights * pl.cdiv(self.num_tokens, tile_m)

    def most_rows(self, tile_m: int) -> int:
        """Rows that an item has at most."""
        return min(self.num_tokens, tile_m)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Items:
    """Which weight multiplies which rows, for each item.

    Attributes:
      weight: i32[N], number in the stack.
      first: i32[N], first row, a multiple of eight.
      target: i32[N], row of the result that it becomes.
      num_rows: i32[N], rows; 0 where there is nothing to do.
      most: rows that no item exceeds; static.
    """

    weight: jax.Array
    first: jax.Array
    target: jax.Array
    num_rows: jax.Array
    most: int = dataclasses.field(metadata={"static": True})

    def of(self, item: jax.Array, tile_m: int) -> tuple[jax.Array, ...]:
        """The fields of one item."""
        del tile_m
        return self.weight[item], self.first[item], self.target[item], self.num_rows[item]

    def count(self, tile_m: int) -> int:
        """Items in all."""
        del tile_m
        return self.weight.shape[0]

    def most_rows(self, tile_m: int) -> int:
        """Rows that an item has at most."""
        return min(self.most, tile_m)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PickedItems:
    """Items of one row each: the weights of a stack that one token picked.

    A number that names no weight makes a row of zeros.

    Attributes:
      weight: i32[N], number in the stack.
      num_weights: weights of the stack.
      share_row: whether all multiply the first row of x, or each its own.
    """

    weight: jax.Array
    num_weights: int = dataclasses.field(metadata={"static": True})
    share_row: bool = dataclasses.field(metadata={"static": True})

    def of(self, item: jax.Array, tile_m: int) -> tuple[jax.Array, ...]:
        """The fields of `Items` of one item."""
        del tile_m
        weight = self.weight[item]
        exists = (weight >= 0) & (weight < self.num_weights)
        first = jnp.int32(0) if self.share_row else item
        # The first weight's address where none is named: no row is multiplied, and nothing is read.
        weight = jnp.where(exists, weight, 0)
        return weight, first, item, jnp.where(exists, 1, 0)

    def count(self, tile_m: int) -> int:
        """Items in all."""
        del tile_m
        return self.weight.shape[0]

    def most_rows(self, tile_m: int) -> int:
        """Rows that an item has at most."""
        del tile_m
        return 1
