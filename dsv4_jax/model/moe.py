"""The mixture of experts: learned and hash routing, clamped SwiGLU, one shared expert.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.config import DSV4Config
from dsv4_jax.linear import grouped_linear, linear
from dsv4_jax.model.params import MoEParams


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
    rows = x.reshape(-1, x.shape[-1])
    share = route(params, rows, token_ids.reshape(-1), config)
    routed = checkpoint_name(_routed(params, rows, share, config), "routed")
    hidden = _swiglu(linear(rows, params.shared_w1), linear(rows, params.shared_w3), config)
    shared = checkpoint_name(linear(hidden.astype(x.dtype), params.shared_w2), "shared")
    return checkpoint_name((routed + shared).reshape(x.shape), "mlp_out")


def route(params: MoEParams, x: jax.Array, token_ids: jax.Array, config: DSV4Config) -> jax.Array:
    """How much of each expert a token gets.

    Args:
      params: parameters of the layer; `tid2eid` makes it a hash layer.
      x: [T, D].
      token_ids: i32[T].
      config: the model.

    Returns:
      f32[T, E], weights of the experts that a token picked, 0 for the others.
    """
    logits = checkpoint_name(linear(x, params.gate, dtype=jnp.float32), "gate/logits")
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if params.tid2eid is not None:
        number = jnp.arange(config.num_routed_experts, dtype=jnp.int32)
        table = params.tid2eid[token_ids]
        picked = jnp.any(table[:, :, None] == number[None, None], axis=1)
    else:
        assert params.bias is not None
        picked = _are_best(scores + params.bias[None], config.num_experts_per_token)
    weights = jnp.where(picked, scores, 0)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return checkpoint_name(weights * config.routed_scaling_factor, "gate/share")


def _are_best(scores: jax.Array, count: int) -> jax.Array:
    """bool[T, E]: whether fewer than `count` others are better, lower numbers first among equals.

    Of a few hundred experts this fuses with what is around it; `jax.lax.top_k` is a sort.
    """
    number = jnp.arange(scores.shape[1], dtype=jnp.int32)
    mine, other = scores[:, :, None], scores[:, None]
    earlier = (number[None, :] < number[:, None])[None]
    better = (other > mine) | ((other == mine) & earlier)
    return jnp.sum(better, axis=-1, dtype=jnp.int32) < count


def _routed(params: MoEParams, x: jax.Array, share: jax.Array, config: DSV4Config) -> jax.Array:
    """Every expert on every token, those that a token did not pick with weight 0.

    A decode step is bound by reading the experts' weights, once each here; as a grouped product
    (`jax.lax.ragged_dot`) XLA multiplies as many rows for every expert, k times as many, and
    copies the weights to transpose them. The weight is applied before the last product.
    """
    num_tokens, num_experts = share.shape

    def project(weight: jax.Array) -> jax.Array:
        rows = linear(x, weight.reshape(-1, x.shape[-1]))
        return rows.reshape(num_tokens, num_experts, -1)

    hidden = _swiglu(project(params.w1), project(params.w3), config) * share[..., None]
    down = grouped_linear(hidden.astype(x.dtype), params.w2, dtype=jnp.float32)
    return jnp.sum(down, axis=1).astype(x.dtype)


def _swiglu(gate: jax.Array, up: jax.Array, config: DSV4Config) -> jax.Array:
    """silu(min(gate, L)) * clip(up, -L, L), in f32."""
    limit = config.swiglu_limit
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)
