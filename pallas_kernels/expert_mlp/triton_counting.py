"""Triton kernels that sort many pairs by expert: a program for each expert, in two launches.

    count_pairs    how many pairs have the expert
    place_pairs    where its rows and tiles begin, from what the experts below it have; then each of
                   its pairs is given the next of its rows

Nothing is sorted: each program looks at all pairs, which L2 holds. The two launches bound it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.expert_mlp.worklist import ALIGNMENT, SortedPairs, max_tiles
from pallas_kernels.gpu import triton

Ref = Any
MAX_PAIRS = 8192
"""Beyond them each program looks at too many, and XLA sorts."""
_PAIRS = 1024
"""That a program looks at together."""
_TILES = 32
"""That it writes together."""
_NUM_WARPS = 4


def sort_many_pairs(
    expert_ids: jax.Array, expert_weights: jax.Array, num_experts: int, tile_rows: int, spare: int
) -> SortedPairs:
    """As `triton_worklist.sort_few_pairs`."""
    num_pairs, picks = expert_ids.size, expert_ids.shape[1]
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    num_parts = pl.cdiv(num_pairs, _PAIRS)
    width = pl.next_power_of_2(num_experts + 1)  # counts

    def each_part[T](ids: Ref, expert: jax.Array, body: Callable[..., T], carry: T) -> T:
        """body(pairs, which of them have the expert, carry), part by part."""

        def run(part: jax.Array, carry: T) -> T:
            pair = part * _PAIRS + jnp.arange(_PAIRS, dtype=jnp.int32)
            is_pair = pair < num_pairs
            # Ids of no expert count as the last program's, number E.
            key = triton.load_where(ids, (pair,), is_pair)
            key = jnp.where((key >= 0) & (key < num_experts), key, num_experts)
            return body(pair, is_pair & (key == expert), carry)

        return jax.lax.fori_loop(0, num_parts, run, carry)

    def count_pairs(inputs: list[Ref], outputs: list[Ref]) -> None:
        (ids,), (counts,) = inputs, outputs
        expert = pl.program_id(0)

        def add(pair: jax.Array, has_it: jax.Array, total: jax.Array) -> jax.Array:
            del pair
            return total + jnp.sum(has_it.astype(jnp.int32))

        counts[expert] = each_part(ids, expert, add, jnp.int32(0))

    def place_pairs(inputs: list[Ref], made: SortedPairs) -> None:
        ids, weights, counts = inputs
        expert = pl.program_id(0)
        number = jnp.arange(width, dtype=jnp.int32)
        is_below = number < expert
        # Of all experts with lower numbers; a program adds them up for itself, and waits for
        # nobody.
        below = triton.load_where(counts, (number,), is_below)
        first_row = jnp.sum(pl.cdiv(below, ALIGNMENT) * ALIGNMENT)
        # An expert's rows begin at a multiple of eight, and its tiles where those of the last one
        # end.
        first_tile = jnp.sum(pl.cdiv(below, tile_rows))
        total = counts[expert]

        def give(pair: jax.Array, has_it: jax.Array, before: jax.Array) -> jax.Array:
            ones = has_it.astype(jnp.int32)
            # In the order of the pairs, so that rows of an expert are in the order of tokens.
            at = first_row + before + jnp.cumsum(ones) - 1
            triton.store_where(made.row, (pair,), at, has_it)
            triton.store_where(made.token, (at,), pair // picks, has_it)
            # No two programs have the same pair or the same row: none waits for another.
            share = triton.load_where(weights, (pair,), has_it)
            triton.store_where(made.share, (at,), share, has_it)
            return before + jnp.sum(ones)

        each_part(ids, expert, give, jnp.int32(0))
        # The last program has the pairs of no expert, and writes the tiles that nobody needs.
        is_expert = expert < num_experts
        num_own = jnp.where(is_expert, pl.cdiv(total, tile_rows), num_tiles - first_tile)

        def write(step: jax.Array, carry: jax.Array) -> jax.Array:
            tile = step * _TILES + jnp.arange(_TILES, dtype=jnp.int32)
            at, exists = first_tile + tile, tile < num_own
            # All tiles of an expert are full but the last.
            left = jnp.minimum(total - tile * tile_rows, tile_rows)
            for target, values, nothing in (
                (made.expert, jnp.full(_TILES, expert, jnp.int32), num_experts - 1),
                (made.first, first_row + tile * tile_rows, 0),
                (made.num_rows, left, 0),
            ):
                triton.store_where(target, (at,), jnp.where(is_expert, values, nothing), exists)
            return carry

        jax.lax.fori_loop(0, pl.cdiv(num_own, _TILES), write, jnp.int32(0))

    ids, programs = expert_ids.reshape(-1), (num_experts + 1,)
    [counts] = triton.launch(
        count_pairs,
        grid=programs,
        inputs=[ids],
        outputs=[jax.ShapeDtypeStruct((num_experts + 1,), jnp.int32)],
        num_warps=_NUM_WARPS,
        name="count_pairs",
    )
    made = triton.launch(
        place_pairs,
        grid=programs,
        inputs=[ids, expert_weights.reshape(-1), counts],
        outputs=SortedPairs.shapes(num_pairs, num_experts, tile_rows, spare),
        num_warps=_NUM_WARPS,
        name="place_pairs",
    )
    return made._replace(row=made.row.reshape(expert_ids.shape))
