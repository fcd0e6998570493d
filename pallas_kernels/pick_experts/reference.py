"""Definition of `pick_experts`.

    z      = gate x
    s_e    = sqrt(softplus(z_e))
    picked = the k largest s_e + b_e, of equals the lower e        or as given
    w_i    = scaling * s_(picked_i) / (sum of the picked + 1e-20)

Padding picks -1, which is no expert, with a weight of 0.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import block_linear

FLOOR = 1e-20
"""Added to the sum of the scores picked."""


class Arguments(NamedTuple):
    """The arguments of `op.pick_experts`, which describes and checks them."""

    logits: jax.Array
    bias: jax.Array | None
    expert_ids: jax.Array | None
    picks: int
    scaling: float
    first: jax.Array | None
    segment_ids: jax.Array | None = None


def router_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """See `op.router_logits`."""
    return block_linear(x, gate, dtype=jnp.float32)


def pick_experts(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.pick_experts`."""
    logits, expert_ids = arguments.logits, arguments.expert_ids
    logits = logits.sum(axis=1) if logits.ndim == 3 else logits  # f32[T, E]
    scores = jnp.sqrt(jax.nn.softplus(logits))  # f32[T, E]
    if expert_ids is None:
        assert arguments.bias is not None  # the op checks
        expert_ids = _best(scores + arguments.bias[None], arguments.picks)  # i32[T, k]
    picked = jnp.take_along_axis(scores, expert_ids, axis=-1)  # f32[T, k]
    total = jnp.sum(picked, axis=-1, keepdims=True) + FLOOR  # f32[T, 1]
    weights = picked / total * arguments.scaling  # f32[T, k]
    if arguments.first is not None:
        expert_ids = expert_ids - arguments.first
    if arguments.segment_ids is None:
        return expert_ids, weights
    live = arguments.segment_ids[:, None] >= 0  # bool[T, 1]
    return jnp.where(live, expert_ids, -1), jnp.where(live, weights, 0.0)


def _best(scores: jax.Array, count: int) -> jax.Array:
    """i32[T, count], the highest of each row, the lower number first among equals; NaN is lowest.

    An expert's rank is the number of those that are better. `jax.lax.top_k` counts NaN highest.
    """
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # f32[T, E]
    number = jnp.arange(scores.shape[1], dtype=jnp.int32)  # i32[E]
    mine, other = scores[:, :, None], scores[:, None]  # f32[T, E, 1], f32[T, 1, E]
    earlier = (number[None, :] < number[:, None])[None]  # bool[1, E, E]
    rank = jnp.sum((other > mine) | ((other == mine) & earlier), axis=-1, dtype=jnp.int32)
    places = jnp.arange(count, dtype=jnp.int32)[None, :, None]  # i32[1, k, 1]
    return jnp.sum(jnp.where(rank[:, None] == places, number, 0), axis=-1, dtype=jnp.int32)
