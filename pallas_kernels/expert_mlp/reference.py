"""Definition of the experts that tokens picked.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear.reference import block_linear, swiglu_linear
from pallas_kernels.common.rounding import round_to
from pallas_kernels.common.swiglu import swiglu
from pallas_kernels.common.weights import Weight
from pallas_kernels.expert_mlp.arguments import Arguments
from pallas_kernels.expert_mlp.worklist import make_worklist

_SMALLEST_TILE, _LARGEST_TILE = 8, 512
"""Rows of a tile; multiples of eight, of which a CPU rounds every row alike."""
_TILES_AT_ONCE = 8
"""Tiles that are one product, whose experts' weights are copied for it."""


def expert_mlp(
    arguments: Arguments, *, in_parts: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """See `op.expert_mlp`; the sum of the routed experts, and the shared one's result."""
    del in_parts
    routed = _routed(arguments)
    if arguments.shared is None:
        return routed, None
    x, (gate, up, down) = arguments.x, arguments.shared
    hidden = swiglu_linear(x, gate, up, limit=arguments.limit)
    return routed, block_linear(hidden[None], _stack(down))[0].astype(x.dtype)


def _routed(arguments: Arguments) -> jax.Array:
    """For each expert, in tiles of the tokens that picked it: w2 (share * swiglu(w1 x, w3 x))."""
    x, expert_ids, expert_weights, w1, w3, w2, limit, *_ = arguments
    num_experts = w1.shape[0]
    tile_rows = _choose_tile(expert_ids.size, num_experts)
    work = make_worklist(expert_ids, num_experts, tile_rows)
    spare = -work.first.size % min(_TILES_AT_ONCE, work.first.size)  # tiles of no rows
    num_tiles = work.first.size + spare
    place = work.row - work.first[work.tile]  # of each pair in its tile
    is_pair = (expert_ids >= 0) & (expert_ids < num_experts)
    slot = jnp.where(is_pair, work.tile * tile_rows + place, num_tiles * tile_rows)
    tokens = jnp.broadcast_to(jnp.arange(x.shape[0])[:, None], slot.shape)

    def in_tiles(values: jax.Array) -> jax.Array:
        empty = jnp.zeros((num_tiles * tile_rows, *values.shape[2:]), values.dtype)
        filled = empty.at[slot].set(values, mode="drop", wrap_negative_indices=False)
        return filled.reshape(num_tiles, tile_rows, *values.shape[2:])

    def run_tile(tile: tuple[jax.Array, ...]) -> jax.Array:
        expert, rows, share = tile

        def multiply(rows: jax.Array, weights: Weight) -> jax.Array:
            one = jax.tree.map(lambda leaf: leaf[expert][None], weights)
            return block_linear(rows[None], one)[0]

        gate, up = (round_to(multiply(rows, w), x.dtype) for w in (w1, w3))
        hidden = swiglu(gate, up, limit) * share[:, None]
        return multiply(round_to(hidden, x.dtype), w2)

    experts = jnp.pad(work.expert, (0, spare), constant_values=num_experts - 1)
    tiles = experts, in_tiles(x[tokens]), in_tiles(expert_weights)
    down = jax.lax.map(run_tile, tiles, batch_size=_TILES_AT_ONCE)
    down = down.reshape(-1, down.shape[-1]).at[slot].get(mode="fill", fill_value=0)
    return jnp.sum(down, axis=1).astype(x.dtype)


def _stack(weight: Weight) -> Weight:
    return jax.tree.map(lambda leaf: leaf[None], weight)


def _choose_tile(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile: an expert's tokens fill a few."""
    tile = _SMALLEST_TILE
    while tile < _LARGEST_TILE and tile * 4 * num_experts < num_pairs:
        tile *= 2
    return tile
