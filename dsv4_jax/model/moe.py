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
from pallas_kernels import Backend, mixture_mlp, pick_experts


def mixture_of_experts(
    params: MoEParams,
    x: jax.Array,
    token_ids: jax.Array,
    config: DSV4Config,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """One feed-forward sublayer.

    Args:
      params: parameters of the layer.
      x: [..., D], normed.
      token_ids: i32[...], which hash layers route by.
      config: the model.
      backend: route of `pick_experts`; only the reference can be differentiated.

    Returns:
      [..., D]: the routed experts' weighted sum plus the shared expert.
    """
    rows = x.reshape(-1, x.shape[-1])
    expert_ids, expert_weights = route(params, rows, token_ids.reshape(-1), config, backend=backend)
    routed, shared = mixture_mlp(
        rows,
        expert_ids,
        expert_weights,
        params.w1,
        params.w3,
        params.w2,
        (params.shared_w1, params.shared_w3, params.shared_w2),
        limit=config.swiglu_limit,
    )
    routed, shared = checkpoint_name(routed, "routed"), checkpoint_name(shared, "shared")
    return checkpoint_name((routed + shared).reshape(x.shape), "mlp_out")


def route(
    params: MoEParams,
    x: jax.Array,
    token_ids: jax.Array,
    config: DSV4Config,
    *,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts that each token picks, and how much of each it gets.

    Args:
      params: parameters of the layer; `tid2eid` makes it a hash layer.
      x: [T, D].
      token_ids: i32[T].
      config: the model.
      backend: see `mixture_of_experts`.

    Returns:
      i32[T, k], distinct; on a learned layer the best first, and of equals the lower number. And
      f32[T, k], their weights, which add up to the model's scaling factor.
    """
    logits = checkpoint_name(linear(x, params.gate, dtype=jnp.float32), "gate/logits")
    table = params.tid2eid
    picked, weights = pick_experts(
        logits,
        bias=params.bias if table is None else None,
        expert_ids=None if table is None else table[token_ids],
        count=config.num_experts_per_token,
        scaling=config.routed_scaling_factor,
        backend=backend,
    )
    return checkpoint_name(picked, "gate/picked"), checkpoint_name(weights, "gate/share")
