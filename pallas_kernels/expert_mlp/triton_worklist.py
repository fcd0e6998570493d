"""Triton kernel that sorts a few pairs by expert: one program, in place of a dozen launches.

    counts of some experts at a time: the pairs that picked each, out of registers
    running sums                     first row and first tile of each expert
    per pair, per tile               sums over experts of what is theirs, by comparison

Nothing is sorted; each pair is compared with each, and each tile with each expert. That takes
about 2 us for a decode step's pairs and limits it to `MAX_PAIRS`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.expert_mlp.worklist import ALIGNMENT, max_rows, max_tiles
from pallas_kernels.gpu import triton

Ref = Any
MAX_PAIRS = 512
_CHUNK = 32
_TABLE = 8192
"""Comparisons that a program holds in registers at once."""
_NUM_WARPS = 2
_MANY_WARPS = 32
"""For more than `_TABLE` comparisons, whose registers 8 warps do not have."""


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
    pairs_width = max(_CHUNK, 1 << (num_pairs - 1).bit_length())
    tiles_width = max(16, 1 << (num_tiles - 1).bit_length())

    chunk_width = max(
        _CHUNK, min(1 << num_experts.bit_length(), _TABLE // max(pairs_width, tiles_width))
    )

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        ids, weights = inputs
        token, row, expert, first, count, share = outputs
        pair = jnp.arange(pairs_width, dtype=jnp.int32)
        tile = jnp.arange(tiles_width, dtype=jnp.int32)
        is_pair = pair < num_pairs

        def keys_of(pair: jax.Array) -> jax.Array:
            """Ids; E for what names no expert, E + 1 for what is no pair."""
            ids_of = triton.load_where(ids, (pair,), pair < num_pairs)
            ids_of = jnp.where((ids_of >= 0) & (ids_of < num_experts), ids_of, num_experts)
            return jnp.where(pair < num_pairs, ids_of, num_experts + 1)

        keys = keys_of(pair)

        def compare(chunk: jax.Array, before: jax.Array) -> jax.Array:
            other = chunk * _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
            same = keys[:, None] == keys_of(other)[None]
            earlier = other[None] < pair[:, None]
            return before + jnp.sum((same & earlier).astype(jnp.int32), axis=1)

        zeros = jnp.zeros(pairs_width, jnp.int32)
        before = jax.lax.fori_loop(0, pairs_width // _CHUNK, compare, zeros)

        def add_experts(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows_before, tiles_before, first_of_pair, *of_tile = carry
            number = chunk * chunk_width + jnp.arange(chunk_width, dtype=jnp.int32)
            picked = (keys[:, None] == number[None]).astype(jnp.int32)
            counts = jnp.sum(picked, axis=0)
            taken = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            tiles = jnp.where(number < num_experts, (counts + tile_rows - 1) // tile_rows, 0)
            first_row = rows_before + jnp.cumsum(taken) - taken
            first_tile = tiles_before + jnp.cumsum(tiles) - tiles
            first_of_pair = first_of_pair + jnp.sum(picked * first_row[None], axis=1)
            inside = tile[:, None] - first_tile[None]
            owns = (inside >= 0) & (inside < tiles[None])
            place = inside * tile_rows
            left = jnp.minimum(counts[None] - place, tile_rows)
            whole = jnp.broadcast_to(number[None], owns.shape)
            found = whole, first_row[None] + place, left
            of_tile = [
                total + jnp.sum(jnp.where(owns, value, 0), axis=1)
                for total, value in zip(of_tile, found, strict=True)
            ]
            rows_after, tiles_after = rows_before + jnp.sum(taken), tiles_before + jnp.sum(tiles)
            return rows_after, tiles_after, first_of_pair, *of_tile

        none = jnp.zeros(tiles_width, jnp.int32)
        start = (jnp.int32(0), jnp.int32(0), zeros, none, none, none)
        chunks = -(-(num_experts + 1) // chunk_width)
        _, _, first_of_pair, *of_tile = jax.lax.fori_loop(0, chunks, add_experts, start)
        place = first_of_pair + before
        triton.store_where(row, (pair,), place, is_pair)
        triton.store_where(token, (place,), pair // picks, is_pair)
        triton.store_where(share, (place,), triton.load_where(weights, (pair,), is_pair), is_pair)
        for target, values in zip((expert, first, count), of_tile, strict=True):
            triton.store_where(target, (tile,), values, tile < num_tiles)

    def integers(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    token, row, *items, share = triton.launch(
        kernel,
        grid=(1,),
        inputs=[expert_ids.reshape(-1), expert_weights.reshape(-1)],
        outputs=[
            integers(num_rows),
            integers(num_pairs),
            *[integers(num_tiles)] * 3,
            jax.ShapeDtypeStruct((num_rows + spare,), jnp.float32),
        ],
        num_warps=_MANY_WARPS if pairs_width * chunk_width > _TABLE else _NUM_WARPS,
        name="sort_by_expert",
    )
    return token, row.reshape(expert_ids.shape), *items, share
