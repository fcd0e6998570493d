"""Definition of the experts that tokens picked.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear.reference import block_linear, swiglu_linear
from pallas_kernels.common.addressing import drop_absent
from pallas_kernels.common.rounding import round_to
from pallas_kernels.common.swiglu import swiglu
from pallas_kernels.common.weights import Weight
from pallas_kernels.expert_mlp.worklist import sort_pairs


class Arguments(NamedTuple):
    """The checked arguments of `op.mixture_mlp`; `op.expert_mlp` has no shared expert.

    Attributes:
      x: [T, D].
      expert_ids: i32[T, k].
      expert_weights: f32[T, k].
      w1: [E, I, D], gate projections.
      w3: [E, I, D], up projections.
      w2: [E, D, I], down projections.
      limit: clamp of gate and up.
      shared: gate [I', D], up [I', D] and down [D, I'], or None.
      picked_among: experts that tokens picked from; None is E.
    """

    x: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array
    w1: Weight
    w3: Weight
    w2: Weight
    limit: float
    shared: tuple[Weight, Weight, Weight] | None = None
    picked_among: int | None = None


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
    x, expert_ids, num_experts = arguments.x, arguments.expert_ids, arguments.w1.shape[0]
    tile_rows = _choose_tile(expert_ids.size, num_experts)
    work = sort_pairs(expert_ids, num_experts, tile_rows)
    spare = -work.first.size % min(_TILES_AT_ONCE, work.first.size)  # tiles of no rows
    num_tiles = work.first.size + spare
    offset = work.row - work.first[work.tile]  # i32[T, k], of each pair in its tile
    is_pair = (expert_ids >= 0) & (expert_ids < num_experts)
    slot = work.tile * tile_rows + offset
    slot = drop_absent(slot, num_tiles * tile_rows, is_there=is_pair)
    tokens = jnp.broadcast_to(jnp.arange(x.shape[0])[:, None], slot.shape)

    def in_tiles(values: jax.Array) -> jax.Array:
        empty = jnp.zeros((num_tiles * tile_rows, *values.shape[2:]), values.dtype)
        filled = empty.at[slot].set(values, mode="drop", wrap_negative_indices=False)
        return filled.reshape(num_tiles, tile_rows, *values.shape[2:])

    def run_tile(tile: tuple[jax.Array, ...]) -> jax.Array:
        expert, rows, share = tile

        def multiply(rows: jax.Array, weights: Weight) -> jax.Array:
            one = jax.tree.map(lambda leaf: leaf[expert][None], weights)  # [1, out, in]
            return block_linear(rows[None], one)[0]  # f32[tile_rows, out]

        projections = arguments.w1, arguments.w3
        gate, up = (round_to(multiply(rows, w), x.dtype) for w in projections)  # [tile_rows, I]
        hidden = swiglu(gate, up, arguments.limit) * share[:, None]
        return multiply(round_to(hidden, x.dtype), arguments.w2)  # f32[tile_rows, D]

    experts = jnp.pad(work.expert, (0, spare), constant_values=num_experts - 1)
    tiles = experts, in_tiles(x[tokens]), in_tiles(arguments.expert_weights)
    down = jax.lax.map(run_tile, tiles, batch_size=_TILES_AT_ONCE)  # f32[N, tile_rows, D]
    down = down.reshape(-1, down.shape[-1]).at[slot].get(mode="fill", fill_value=0)  # f32[T, k, D]
    return jnp.sum(down, axis=1).astype(x.dtype)  # over the picks


def _stack(weight: Weight) -> Weight:
    return jax.tree.map(lambda leaf: leaf[None], weight)


def _choose_tile(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile: an expert's tokens fill a few."""
    tile = _SMALLEST_TILE
    while tile < _LARGEST_TILE and tile * 4 * num_experts < num_pairs:
        tile *= 2
    return tile
