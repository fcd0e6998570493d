"""The mixture of experts: learned and hash routing, clamped SwiGLU, one shared expert.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.config import DSV4Config
from dsv4_jax.linear import linear
from dsv4_jax.model.params import MoEParams
from pallas_kernels import expert_mlp, swiglu_linear


def mixture_of_experts(
    params: MoEParams, x: jax.Array, token_ids: jax.Array, config: DSV4Config
) -> jax.Array:
    """One feed-forward sublayer.

    Args:
      params: parameters of the layer.
      x: [..., D], normed.
      token_ids: i32[...], which hash layers route by.
      config: the model.

    Returns:
      [..., D]: the routed experts' weighted sum plus the shared expert.
    """
    rows, limit = x.reshape(-1, x.shape[-1]), config.swiglu_limit
    expert_ids, expert_weights = route(params, rows, token_ids.reshape(-1), config)
    experts = params.w1, params.w3, params.w2
    routed = expert_mlp(rows, expert_ids, expert_weights, *experts, limit=limit)
    hidden = swiglu_linear(rows, params.shared_w1, params.shared_w3, limit=limit)
    shared = checkpoint_name(linear(hidden, params.shared_w2), "shared")
    routed = checkpoint_name(routed, "routed")
    return checkpoint_name((routed + shared).reshape(x.shape), "mlp_out")


def route(
    params: MoEParams, x: jax.Array, token_ids: jax.Array, config: DSV4Config
) -> tuple[jax.Array, jax.Array]:
    """The experts that each token picks, and how much of each it gets.

    Args:
      params: parameters of the layer; `tid2eid` makes it a hash layer.
      x: [T, D].
      token_ids: i32[T].
      config: the model.

    Returns:
      i32[T, k], distinct; on a learned layer the best first, and of equals the lower number. And
      f32[T, k], their weights, which add up to the model's scaling factor.
    """
    logits = checkpoint_name(linear(x, params.gate, dtype=jnp.float32), "gate/logits")
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if params.tid2eid is not None:
        picked = params.tid2eid[token_ids]
    else:
        assert params.bias is not None
        picked = _best(scores + params.bias[None], config.num_experts_per_token)
    picked = checkpoint_name(picked, "gate/picked")
    weights = jnp.take_along_axis(scores, picked, axis=-1)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return picked, checkpoint_name(weights * config.routed_scaling_factor, "gate/share")


def _best(scores: jax.Array, count: int) -> jax.Array:
    """i32[T, count], the highest of each row, the lower number first among equals; NaN is lowest.

    An expert's rank is the number of those that are better: of a few hundred, XLA makes two kernels
    of this, where `jax.lax.top_k` is a sort.
    """
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    number = jnp.arange(scores.shape[1], dtype=jnp.int32)
    mine, other = scores[:, :, None], scores[:, None]
    earlier = (number[None, :] < number[:, None])[None]
    rank = jnp.sum((other > mine) | ((other == mine) & earlier), axis=-1, dtype=jnp.int32)
    places = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(rank[:, None] == places, number, 0), axis=-1, dtype=jnp.int32)
