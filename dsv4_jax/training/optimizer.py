"""How a training moves parameters, and how XLA is to run it."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

XLA_TRAINING_FLAGS = {"xla_gpu_enable_triton_gemm": "false", "xla_gpu_autotune_level": "0"}
"""Products go to cuBLAS, without trials of other ways to compute them.

A step of the large model takes three times as long with XLA's own kernels and without trials.
Trials more than double the time to compile.
"""


def rate_at(highest: float, warm_up: int, count: int, done: float) -> jax.Array:
    """The learning rate of a step, f32[].

    Args:
      highest: what it rises to.
      warm_up: steps of which each has a larger share of it, the last one all.
      count: steps before this one.
      done: what they are of the whole training, 0 to 1; a cosine falls to a hundredth at 1.
    """
    warm = optax.linear_schedule(0.0, 1.0, warm_up)(count + 1)
    return jnp.float32(highest * warm * optax.cosine_decay_schedule(1.0, 1, alpha=0.01)(done))


def make_optimizer(params: Any) -> optax.GradientTransformation:
    """Adam at rate 1, for the caller to scale by the rate of the moment; tables stay."""
    labels = jax.tree.map(lambda leaf: "keep" if leaf.dtype == jnp.int32 else "train", params)
    adam = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95), optax.scale(-1.0)
    )
    return optax.multi_transform({"train": adam, "keep": optax.set_to_zero()}, cast(Any, labels))


def move[Tree](params: Tree, updates: Any, rate: jax.Array, decay: jax.Array) -> Tree:
    """The parameters after a step.

    Args:
      params: before it.
      updates: of `make_optimizer`.
      rate: f32[], the learning rate.
      decay: f32[], weight decay of matrices, per unit of the learning rate.
    """

    def moved(path: tuple, param: jax.Array, update: jax.Array) -> jax.Array:
        shrink = decay * param if _is_matrix(path) else jnp.zeros_like(param)
        return param + (rate * (update - shrink)).astype(param.dtype)

    return jax.tree_util.tree_map_with_path(moved, params, updates)


def _is_matrix(path: tuple) -> bool:
    """Whether weight decay applies: to what multiplies activations."""
    name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
    return "norm" not in name and name not in ("attn_sink", "bias", "ape", "scale", "base")
