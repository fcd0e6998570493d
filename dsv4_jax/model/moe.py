"""The mixture of experts: learned and hash routing, clamped SwiGLU, one shared expert.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.projections import grouped_linear, linear
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import MoEParams


def mixture_of_experts(
    params: MoEParams, x: jax.Array, token_ids: jax.Array, config: DSV4Config
) -> jax.Array:
    """One feed-forward sublayer.

    Args:
      params: of the layer.
      x: [..., D], normed.
      token_ids: i32[...], which hash layers route by.
      config: the model.

    Returns:
      [..., D]: the routed experts' weighted sum plus the shared expert.
    """
    rows = x.reshape(-1, x.shape[-1])
    experts, weights = route(params, rows, token_ids.reshape(-1), config)
    routed = checkpoint_name(_routed(params, rows, experts, weights, config), "routed")
    hidden = _swiglu(linear(rows, params.shared_w1), linear(rows, params.shared_w3), config)
    shared = checkpoint_name(linear(hidden.astype(x.dtype), params.shared_w2), "shared")
    return checkpoint_name((routed + shared).reshape(x.shape), "mlp_out")


def route(
    params: MoEParams, x: jax.Array, token_ids: jax.Array, config: DSV4Config
) -> tuple[jax.Array, jax.Array]:
    """Experts of each token and their weights.

    Args:
      params: of the layer; `tid2eid` makes it a hash layer.
      x: [T, D].
      token_ids: i32[T].
      config: the model.

    Returns:
      i32[T, k] and f32[T, k].
    """
    logits = checkpoint_name(linear(x, params.gate, dtype=jnp.float32), "gate/logits")
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if params.tid2eid is not None:
        experts = params.tid2eid[token_ids]
    else:
        assert params.bias is not None
        _, experts = jax.lax.top_k(scores + params.bias[None], config.num_experts_per_token)
    experts = checkpoint_name(experts, "gate/indices")
    picked = jnp.take_along_axis(scores, experts, axis=-1)
    weights = picked / (jnp.sum(picked, axis=-1, keepdims=True) + 1e-20)
    return experts, checkpoint_name(weights * config.routed_scaling_factor, "gate/weights")


def _routed(
    params: MoEParams,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    config: DSV4Config,
) -> jax.Array:
    """Every expert on every token, those that a token did not pick with weight 0.

    A decode step is bound by reading the experts' weights, once each here; as a grouped product
    (`jax.lax.ragged_dot`) XLA multiplies as many rows for every expert, k times as many, and
    copies the weights to turn them round. The weight is applied before the last product.
    """
    num_tokens, num_experts = x.shape[0], config.num_routed_experts
    picked = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
    share = jnp.sum(picked * weights[..., None], axis=1)

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
