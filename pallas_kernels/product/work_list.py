"""The items of a product: which weight of a stack multiplies which rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EvenItems:
    """Items that follow from their number: each weight of a stack multiplies a group of rows.

    Attributes:
      num_groups: weights of the stack.
      num_tokens: rows of a group.
      spread: rows from the beginning of a group to that of the next, in x.
      first: row of x that the first group begins with.
      target: row of the result that the first group begins with.
    """

    num_groups: int
    num_tokens: int
    spread: int
    first: int = 0
    target: int = 0

    def of(self, item: jax.Array, columns: int) -> tuple[jax.Array, ...]:
        """The fields of `Items` of one item."""
        tiles = self.count(columns) // self.num_groups
        weight = lax.div(item, tiles)
        inside = lax.rem(item, tiles) * columns
        num_rows = jnp.minimum(self.num_tokens - inside, columns)
        first = self.first + weight * self.spread + inside
        return weight, first, self.target + weight * self.num_tokens + inside, num_rows

    def count(self, columns: int) -> int:
        """Items in all."""
        return self.num_groups * -(-self.num_tokens // columns)

    def most_rows(self, columns: int) -> int:
        """Rows that an item has at most."""
        return min(self.num_tokens, columns)


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

    def of(self, item: jax.Array, columns: int) -> tuple[jax.Array, ...]:
        """The fields of one item."""
        del columns
        return self.weight[item], self.first[item], self.target[item], self.num_rows[item]

    def count(self, columns: int) -> int:
        """Items in all."""
        del columns
        return self.weight.shape[0]

    def most_rows(self, columns: int) -> int:
        """Rows that an item has at most."""
        return min(self.most, columns)


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

    def of(self, item: jax.Array, columns: int) -> tuple[jax.Array, ...]:
        """The fields of `Items` of one item."""
        del columns
        weight = self.weight[item]
        exists = (weight >= 0) & (weight < self.num_weights)
        first = jnp.int32(0) if self.share_row else item
        weight = jnp.where(exists, weight, 0)
        return weight, first, item, jnp.where(exists, 1, 0)

    def count(self, columns: int) -> int:
        """Items in all."""
        del columns
        return self.weight.shape[0]

    def most_rows(self, columns: int) -> int:
        """Rows that an item has at most."""
        del columns
        return 1
