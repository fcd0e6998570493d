"""Triton kernel that sorts some pairs by expert in one launch, in place of a dozen.

    an expert a thread    how many pairs have it; sums of those are its first row and first tile
    a pair a thread       how many pairs of its expert come before it: its row

Then each pair stores its row, and the first of a tile the tile. Nothing is sorted. A program has up
to 512 pairs; several count all experts each, and need not wait for each other. The launch bounds a
decode step's few pairs, the two passes over all pairs hundreds of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.expert_mlp.worklist import ALIGNMENT, max_rows, max_tiles
from pallas_kernels.gpu import triton

Ref = Any
MAX_PAIRS = 2048
"""A thread compares its pair with all others, which grows with their square."""
_PAIRS = 512
"""Of a program."""
_SECOND = 1 << 16
"""Rows and tiles are one sum: rows, and tiles times this."""
_AT_ONCE = 8
"""Pairs that a thread loads at once."""


def make_worklist(
    expert_ids: jax.Array, expert_weights: jax.Array, num_experts: int, tile_rows: int, spare: int
) -> tuple[jax.Array, ...]:
    """`worklist.make_worklist` without its `tile`, and the shares of rows.

    Returns:
      token i32[R], row i32[T, k], expert, first and num_rows i32[N], and f32[R + spare]; entries of
      nobody's rows are arbitrary.
    """
    num_pairs, picks = expert_ids.size, expert_ids.shape[1]
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    num_rows = max_rows(num_pairs, num_experts)
    width = min(_PAIRS, max(32, 1 << (num_pairs - 1).bit_length()))
    experts_width = max(32, 1 << (num_experts - 1).bit_length())
    tiles_width = max(32, 1 << (num_tiles - 1).bit_length())
    programs, steps = -(-num_pairs // width), -(-num_pairs // _AT_ONCE)

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        ids, weights = inputs
        token, row, expert, first, count, share, starts_ref, counts_ref = outputs
        program = pl.program_id(0)
        number = jnp.arange(experts_width, dtype=jnp.int32)
        is_expert = number < num_experts
        pair = program * width + jnp.arange(width, dtype=jnp.int32)
        is_pair = pair < num_pairs

        def key(expert_id: jax.Array) -> jax.Array:
            """Its number; E of what names no expert."""
            return jnp.where((expert_id >= 0) & (expert_id < num_experts), expert_id, num_experts)

        def others(step: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
            """Some pairs, and the key of each; E + 1 beyond the last."""
            pairs = [step * _AT_ONCE + i for i in range(_AT_ONCE)]
            keys = [key(ids[jnp.minimum(other, num_pairs - 1)]) for other in pairs]
            return [
                (other, jnp.where(other < num_pairs, found, num_experts + 1))
                for other, found in zip(pairs, keys, strict=True)
            ]

        def count_pairs(step: jax.Array, counts: jax.Array) -> jax.Array:
            for _, found in others(step):
                counts += jnp.where(found == number, 1, 0)
            return counts

        zeros = jnp.zeros(experts_width, jnp.int32)
        counts = jnp.where(is_expert, jax.lax.fori_loop(0, steps, count_pairs, zeros), 0)
        rows, tiles = -(-counts // ALIGNMENT) * ALIGNMENT, -(-counts // tile_rows)
        taken = rows + tiles * _SECOND
        starts = jnp.cumsum(taken) - taken
        all_rows, all_tiles = jnp.sum(rows), jnp.sum(tiles)
        triton.store_where(starts_ref, (program, number), starts, is_expert)
        triton.store_where(counts_ref, (program, number), counts, is_expert)
        triton.wait_for_all_threads()

        keys = jnp.where(is_pair, key(triton.load_where(ids, (pair,), is_pair)), num_experts)
        has_expert = keys < num_experts

        def count_before(step: jax.Array, before: jax.Array) -> jax.Array:
            for other, found in others(step):
                before += jnp.where((found == keys) & (other < pair), 1, 0)
            return before

        before = jax.lax.fori_loop(0, steps, count_before, jnp.zeros(width, jnp.int32))
        starts = triton.load_where(starts_ref, (program, keys), has_expert)
        of_expert = triton.load_where(counts_ref, (program, keys), has_expert)
        place = jnp.where(has_expert, starts % _SECOND, all_rows) + before
        triton.store_where(row, (pair,), place, is_pair)
        triton.store_where(token, (place,), pair // picks, is_pair)
        triton.store_where(share, (place,), triton.load_where(weights, (pair,), is_pair), is_pair)
        begins = has_expert & (before % tile_rows == 0)
        tile = starts // _SECOND + before // tile_rows
        left = jnp.minimum(of_expert - before, tile_rows)
        empty = jnp.arange(tiles_width, dtype=jnp.int32)
        is_empty = (empty >= all_tiles) & (empty < num_tiles)
        for target, values, nothing in (
            (expert, keys, num_experts - 1),
            (first, place, 0),
            (count, left, 0),
        ):
            triton.store_where(target, (tile,), values, begins)
            unused = jnp.full(tiles_width, nothing, jnp.int32)
            triton.store_where(target, (empty,), unused, is_empty)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    token, row, *items, share, _, _ = triton.launch(
        kernel,
        grid=(programs,),
        inputs=[expert_ids.reshape(-1), expert_weights.reshape(-1)],
        outputs=[
            integers(num_rows),
            integers(num_pairs),
            *[integers(num_tiles)] * 3,
            jax.ShapeDtypeStruct((num_rows + spare,), jnp.float32),
            *[integers(programs, num_experts)] * 2,
        ],
        num_warps=max(width, experts_width) // 32,
        name="sort_by_expert",
    )
    return token, row.reshape(expert_ids.shape), *items, share
