"""The work list of a product: items, each a weight of a stack and rows that it multiplies.

An item has at most `Tiling.tile_m` rows; with the tiles of outputs it is what a CTA works on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.product.pairs import Pairs


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
        inside = lax.rem(item, tiles) * tile_m
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairItems:
    """Items that CTAs find themselves, of few pairs of a token and a weight that it picked.

    An item is a pair. The first one that names a weight has the rows of all that do, and the others
    have none, as have those whose number names no weight. A pair's row of the result has its
    number. See `pairs.Pairs`.

    Attributes:
      weight: i32[P], number in the stack, token by token; at most `MOST_PAIRS`.
      num_weights: weights of the stack.
      picks: pairs of a token, which multiply the same row of x; 1 where each has a row of its own.
      most: pairs that no weight exceeds, as no token picks one twice.
    """

    weight: jax.Array
    num_weights: int = dataclasses.field(metadata={"static": True})
    picks: int = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})

    def of(self, item: jax.Array, tile_m: int) -> tuple[Any, ...]:
        """The fields of `Items` of one item, whose rows are numbered from 0 on, and its pairs."""
        del tile_m
        weight, zero = self.weight[item], jnp.int32(0)
        exists = (weight >= 0) & (weight < self.num_weights)
        pairs = Pairs.find(self.weight, weight, self.most)
        has_rows = exists & (pairs.first == item)
        num_rows = jnp.where(has_rows, pairs.count, 0)
        return jnp.where(exists, weight, 0), zero, zero, num_rows, pairs

    def count(self, tile_m: int) -> int:
        """Items in all."""
        del tile_m
        return self.weight.shape[0]

    def most_rows(self, tile_m: int) -> int:
        """Rows that an item has at most."""
        return min(self.most, tile_m)
