"""The mixture of experts: learned and hash routing, clamped SwiGLU, one shared expert.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.projections import linear
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
    """Each expert's tokens in one grouped product; the weight is applied before the last one."""
    num_tokens, per_token = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)
    group_sizes = jnp.bincount(experts.reshape(-1), length=config.num_routed_experts)
    gathered = x[order // per_token]

    def grouped(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(
            rows,
            weight.mT,
            group_sizes.astype(jnp.int32),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    gate = grouped(gathered, params.w1).astype(x.dtype)
    up = grouped(gathered, params.w3).astype(x.dtype)
    hidden = _swiglu(gate, up, config) * weights.reshape(-1)[order, None]
    down = grouped(hidden.astype(x.dtype), params.w2)
    back = jnp.zeros_like(down).at[order].set(down, unique_indices=True)
    return jnp.sum(back.reshape(num_tokens, per_token, -1), axis=1).astype(x.dtype)


def _swiglu(gate: jax.Array, up: jax.Array, config: DSV4Config) -> jax.Array:
    """silu(min(gate, L)) * clip(up, -L, L), in f32."""
    limit = config.swiglu_limit
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)
