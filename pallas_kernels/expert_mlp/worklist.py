"""Which expert multiplies which rows: tokens sorted by the experts that they picked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ALIGNMENT = 8
"""Of an expert's first row: bulk copies take eight rows together."""
_FEW_PAIRS = 1024
"""Pairs up to which comparing each with each is faster than sorting: a launch or two."""


class Worklist(NamedTuple):
    """Pairs of a token and an expert that it picked, sorted by expert, and cut into tiles.

    A row is a place in that order; an expert's rows begin at a multiple of eight, so that some are
    nobody's. Ids outside 0 .. E - 1 come last and are in no tile.

    Attributes:
      token: i32[R], token of each row; 0 of nobody's. R is `max_rows`.
      row: i32[T, k], row of each pair.
      expert: i32[N], expert of each tile; E - 1 where there is no tile.
      first: i32[N], its first row.
      num_rows: i32[N], its rows; 0 where there is no tile.
      tile: i32[T, k], tile that each pair is in.
    """

    token: jax.Array
    row: jax.Array
    expert: jax.Array
    first: jax.Array
    num_rows: jax.Array
    tile: jax.Array


def max_rows(num_pairs: int, num_experts: int) -> int:
    """Rows that P pairs can take at most, whatever the routing."""
    return num_pairs + (ALIGNMENT - 1) * min(num_experts + 1, num_pairs)


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Tiles that P pairs can make at most, whatever the routing."""
    full, experts = num_pairs // tile_rows, min(num_experts, num_pairs)
    return min(num_pairs, full + experts)


class SortedPairs(NamedTuple):
    """What a product takes of a `Worklist`, and the shares of rows.

    Attributes:
      token: i32[R], as of `Worklist`, as are those that follow; entries of nobody's rows are
        arbitrary.
      row: i32[T, k].
      expert: i32[N].
      first: i32[N].
      num_rows: i32[N].
      share: f32[R + spare], of each row.
    """

    token: jax.Array
    row: jax.Array
    expert: jax.Array
    first: jax.Array
    num_rows: jax.Array
    share: jax.Array

    @classmethod
    def shapes(cls, num_pairs: int, num_experts: int, tile_rows: int, spare: int) -> Any:
        """As a kernel makes them, with `row` i32[T * k]."""

        def integers(size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size,), jnp.int32)

        num_rows = max_rows(num_pairs, num_experts)
        tiles = integers(max_tiles(num_pairs, num_experts, tile_rows))
        share = jax.ShapeDtypeStruct((num_rows + spare,), jnp.float32)
        return cls(integers(num_rows), integers(num_pairs), tiles, tiles, tiles, share)  # type: ignore[arg-type]


def sort_pairs(expert_ids: jax.Array, num_experts: int, tile_rows: int) -> Worklist:
    """Sorts pairs by expert, then by token.

    Args:
      expert_ids: i32[T, k].
      num_experts: E.
      tile_rows: rows of a tile at most.

    Returns:
      `Worklist`, N = `max_tiles`.
    """
    num_tokens, picks = expert_ids.shape
    ids = expert_ids.reshape(-1)  # i32[P], P = T * k
    num_pairs = ids.shape[0]
    keys = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)  # those of none come last
    experts = jnp.arange(num_experts + 1, dtype=jnp.int32)
    pairs = jnp.arange(num_pairs, dtype=jnp.int32)
    if num_pairs <= _FEW_PAIRS:
        mine, other = keys[:, None], keys[None]
        # By expert, then by token: each pair's place is the number of pairs before it.
        before = (other < mine) | ((other == mine) & (pairs[None] < pairs[:, None]))
        rank = jnp.sum(before, axis=1, dtype=jnp.int32)  # i32[P]
    else:
        order = jnp.argsort(keys, stable=True).astype(jnp.int32)
        rank = jnp.zeros(num_pairs, jnp.int32).at[order].set(pairs)
    # Not a binary search: XLA's is a loop that the host drives.
    starts = jnp.sum(keys[None] < experts[:, None], axis=1, dtype=jnp.int32)  # i32[E + 1]
    counts = starts[1:] - starts[:-1]  # i32[E], pairs of each
    ends = jnp.cumsum(pl.cdiv(counts, ALIGNMENT) * ALIGNMENT)
    first_row = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])  # i32[E + 1], aligned
    row = first_row[keys] + rank - starts[keys]  # i32[P]
    token = jnp.zeros(max_rows(num_pairs, num_experts), jnp.int32).at[row].set(pairs // picks)
    tiles_of = pl.cdiv(counts, tile_rows)  # i32[E]
    first_tile = jnp.cumsum(tiles_of) - tiles_of
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    number = jnp.arange(num_tiles, dtype=jnp.int32)
    # The last expert whose tiles begin at or before this one; those without tiles begin where the
    # next does, and are passed over.
    expert = jnp.sum(first_tile[None] <= number[:, None], axis=1, dtype=jnp.int32) - 1
    inside = (number - first_tile[expert]) * tile_rows  # i32[N], rows of the expert before
    num_rows = jnp.clip(counts[expert] - inside, 0, tile_rows)
    # What names no expert has no tile; it gets some number within the arrays.
    nearest = jnp.minimum(keys, num_experts - 1)
    tile = first_tile[nearest] + (row - first_row[nearest]) // tile_rows
    return Worklist(
        token=token,
        row=row.reshape(num_tokens, picks),
        expert=expert,
        first=first_row[expert] + inside,
        num_rows=num_rows,
        tile=jnp.minimum(tile, num_tiles - 1).reshape(num_tokens, picks),
    )
