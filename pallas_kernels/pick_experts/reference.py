"""Definition of `pick_experts`.

    z      = gate x
    s_e    = sqrt(softplus(z_e))
    picked = the k largest s_e + b_e, of equals the lower e        or as given
    w_i    = scaling * s_(picked_i) / (sum of the picked + 1e-20)

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import block_linear
from pallas_kernels.pick_experts.arguments import Arguments

FLOOR = 1e-20
"""Added to the sum of the scores picked."""


def router_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """See `op.router_logits`."""
    return block_linear(x, gate, dtype=jnp.float32)


def pick_experts(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.pick_experts`."""
    logits, bias, expert_ids, count, scaling, first = arguments
    logits = logits.sum(axis=1) if logits.ndim == 3 else logits
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if expert_ids is None:
        assert bias is not None
        expert_ids = _best(scores + bias[None], count)
    picked = jnp.take_along_axis(scores, expert_ids, axis=-1)
    weights = picked / (jnp.sum(picked, axis=-1, keepdims=True) + FLOOR) * scaling
    return expert_ids if first is None else expert_ids - first, weights


def _best(scores: jax.Array, count: int) -> jax.Array:
    """i32[T, count], the highest of each row, the lower number first among equals; NaN is lowest.

    An expert's rank is the number of those that are better. `jax.lax.top_k` counts NaN highest.
    """
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    number = jnp.arange(scores.shape[1], dtype=jnp.int32)
    mine, other = scores[:, :, None], scores[:, None]
    earlier = (number[None, :] < number[:, None])[None]
    rank = jnp.sum((other > mine) | ((other == mine) & earlier), axis=-1, dtype=jnp.int32)
    places = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(rank[:, None] == places, number, 0), axis=-1, dtype=jnp.int32)
