"""Triton kernel that sorts a few pairs by expert: one program, in place of a dozen launches.

A thread has a pair, and goes through all pairs twice:

    how many have its expert, and how many of those come before it
    what the experts with lower numbers take, from the first pair of each

Then each pair stores its row, and the first of a tile the tile. Nothing is sorted. The launch
bounds a decode step's few pairs, the two passes hundreds of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.expert_mlp.worklist import ALIGNMENT, SortedPairs, max_tiles
from pallas_kernels.gpu import triton

Ref = Any
MAX_PAIRS = 256
"""Beyond them `triton_counting` is faster."""
_SECOND = 1 << 16
_AT_ONCE = 8
"""Pairs that a thread loads at once."""


def sort_few_pairs(
    expert_ids: jax.Array, expert_weights: jax.Array, num_experts: int, tile_rows: int, spare: int
) -> SortedPairs:
    """`worklist.sort_pairs` without its `tile`, and the shares of rows."""
    num_pairs, picks = expert_ids.size, expert_ids.shape[1]
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    width = max(32, pl.next_power_of_2(num_pairs))
    tiles_width = max(32, pl.next_power_of_2(num_tiles))

    def kernel(inputs: list[Ref], outputs: tuple[SortedPairs, Ref]) -> None:
        (ids, weights), (made, taken_ref) = inputs, outputs
        pair = jnp.arange(width, dtype=jnp.int32)
        is_pair = pair < num_pairs

        def key(expert_id: jax.Array) -> jax.Array:
            """Its number; E of what names no expert."""
            return jnp.where((expert_id >= 0) & (expert_id < num_experts), expert_id, num_experts)

        def others(step: jax.Array) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
            """Some pairs: number, address and key; E + 1 beyond the last."""
            numbers = [step * _AT_ONCE + i for i in range(_AT_ONCE)]
            addresses = [jnp.minimum(number, num_pairs - 1) for number in numbers]
            keys = [
                jnp.where(number < num_pairs, key(ids[address]), num_experts + 1)
                for number, address in zip(numbers, addresses, strict=True)
            ]
            return list(zip(numbers, addresses, keys, strict=True))

        # i32[width], a pair for each thread; those beyond the last have a key that no pair has.
        keys = key(triton.load_where(ids, (pair,), is_pair))
        keys = jnp.where(is_pair, keys, num_experts + 1)

        def compare(step: jax.Array, counted: jax.Array) -> jax.Array:
            for number, _, other in others(step):
                # Two counts in one word, below 2^16 each: those of the same expert, and of them the
                # ones before.
                added = jnp.where(number < pair, 1 + _SECOND, 1)
                counted += jnp.where(other == keys, added, 0)
            return counted

        steps, zeros = pl.cdiv(num_pairs, _AT_ONCE), jnp.zeros(width, jnp.int32)
        of_expert, before = _apart(jax.lax.fori_loop(0, steps, compare, zeros))
        # The first pair of each expert answers for all of its rows and tiles.
        leads = (before == 0) & is_pair
        rows = jnp.where(leads, pl.cdiv(of_expert, ALIGNMENT) * ALIGNMENT, 0)
        tiles = jnp.where(leads & (keys < num_experts), pl.cdiv(of_expert, tile_rows), 0)
        triton.store_where(taken_ref, (pair,), rows + tiles * _SECOND, is_pair)
        # Stored by one thread each and read by all: through memory, since threads hold a pair each.
        triton.wait_for_all_threads()

        def add_lower(
            step: jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            lower, total = carry
            for number, address, other in others(step):
                taken = jnp.where(number < num_pairs, taken_ref[address], 0)
                lower += jnp.where(other < keys, taken, 0)
                total += taken
            return lower, total

        lower, total = jax.lax.fori_loop(0, steps, add_lower, (zeros, jnp.int32(0)))
        (first_row, first_tile), (_, num_used) = _apart(lower), _apart(total)
        own_row = first_row + before  # i32[width], runs of experts are aligned
        triton.store_where(made.row, (pair,), own_row, is_pair)
        triton.store_where(made.token, (own_row,), pair // picks, is_pair)
        # Threads behind the last pair have no row, and load and store nothing.
        share = triton.load_where(weights, (pair,), is_pair)
        triton.store_where(made.share, (own_row,), share, is_pair)
        inside = before % tile_rows
        # The pair in a tile's first row stores the tile, which no other pair does.
        begins = (inside == 0) & (keys < num_experts)
        tile = first_tile + before // tile_rows
        left = jnp.minimum(of_expert - before, tile_rows)
        # Tiles that no pair begins have no rows, and the product's CTAs of them end at once.
        empty = jnp.arange(tiles_width, dtype=jnp.int32)
        is_empty = (empty >= num_used) & (empty < num_tiles)
        for target, values, nothing in (
            (made.expert, keys, num_experts - 1),
            (made.first, own_row, 0),
            (made.num_rows, left, 0),
        ):
            triton.store_where(target, (tile,), values, begins)
            unused = jnp.full(tiles_width, nothing, jnp.int32)
            triton.store_where(target, (empty,), unused, is_empty)

    made, _ = triton.launch(
        kernel,
        grid=(1,),
        inputs=[expert_ids.reshape(-1), expert_weights.reshape(-1)],
        outputs=(
            SortedPairs.shapes(num_pairs, num_experts, tile_rows, spare),
            jax.ShapeDtypeStruct((num_pairs,), jnp.int32),
        ),
        num_warps=width // 32,
        name="sort_by_expert",
    )
    return made._replace(row=made.row.reshape(expert_ids.shape))


def _apart(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two numbers that are one sum: the first, below 65,536, and how often `_SECOND` is in."""
    return packed % _SECOND, packed // _SECOND
