"""From a router's logits to the experts of each token and their weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_arrays,
    check_floats,
    check_indices,
    check_integer,
    check_number,
    check_rank,
    check_same_length,
    check_shape,
)
from pallas_kernels.pick_experts import reference, triton_gpu
from pallas_kernels.pick_experts.reference import Arguments

_LOGITS = {
    Backend.REFERENCE: reference.router_logits,
    Backend.TRITON_GPU: triton_gpu.router_logits,
}
_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.pick_experts,
    Backend.TRITON_GPU: triton_gpu.pick_experts,
}


def router_logits(x: jax.Array, gate: jax.Array, *, backend: Backend | None = None) -> jax.Array:
    """The product of a router, for `pick_experts`, accumulated in f32.

    In plain JAX:

        logits = x @ gate.T                                                 # f32[T, E]

    Args:
      x: [T, D].
      gate: [E, D], a logit of each expert.
      backend: implementation to use; None picks the fastest one that runs here. That is XLA's
        product on a GPU too for one token, for more than 128, and for what is not in bf16.

    Returns:
      f32[T, E], or f32[T, P, E] in P parts. Only the reference can be differentiated.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the named backend can't run here, or not with these dtypes.

    Source: deepseek_v4.md section 1.5.
    """
    check_rank(2, x=x, gate=gate)
    check_floats(x=x, gate=gate)
    check_shape("gate", gate, (gate.shape[0], x.shape[1]), "E, D")
    is_bf16 = x.dtype == gate.dtype == jnp.bfloat16
    few = is_bf16 and triton_gpu.LEAST_TOKENS <= x.shape[0] <= triton_gpu.MOST_TOKENS
    implementation = resolve(
        "router_logits",
        backend,
        _LOGITS,
        preferred=Backend.TRITON_GPU if few else Backend.REFERENCE,
        obstacle=None if is_bf16 else f"takes bf16, got {x.dtype} and {gate.dtype}",
    )
    return implementation(*jax_arrays(x, gate))


def pick_experts(
    logits: jax.Array,
    *,
    bias: jax.Array | None = None,
    expert_ids: jax.Array | None = None,
    count: int,
    scaling: float,
    first: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Picks the experts of each token, and weighs them.

    An expert's score is the square root of the softplus of its logit. Either the best are picked by
    score plus bias, or `expert_ids` says which; weights are the scores of those picked.

    In plain JAX, on a learned layer:

        scores = jnp.sqrt(jax.nn.softplus(logits))                          # f32[T, E]
        ids = jax.lax.top_k(scores + bias, count)[1]                        # i32[T, k]
        picked = jnp.take_along_axis(scores, ids, axis=1)                   # f32[T, k]
        weights = picked / jnp.sum(picked, axis=1, keepdims=True) * scaling

    Args:
      logits: f32[T, E]; or f32[T, P, E], in P parts that are added here.
      bias: f32[E], added to scores for picking alone; None with `expert_ids`.
      expert_ids: i32[T, count], the experts of a hash layer; None on a learned one.
      count: experts of a token, k.
      scaling: what the weights of a token add up to.
      first: i32[], the expert that is number 0 in the result, as on a device that has those from
        there on; None is 0.
      segment_ids: i32[T], as of `CallIndices`: a token of -1 is padding and picks no expert. None
        has no padding.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      i32[T, k] less `first`, distinct on a learned layer: the best first, of equals the lower
      number, and NaN below all others; of padding -1. And f32[T, k], their weights; of padding 0.
      Only the reference can be differentiated.

    Raises:
      ValueError: a shape or dtype is wrong, `count` is not within 1 .. E, or both or neither of
        `bias` and `expert_ids` are given.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 1.5.
    """
    check_arrays(logits=logits)
    check_rank(3 if logits.ndim == 3 else 2, logits=logits)
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")
    num_experts = logits.shape[-1]
    count = check_integer("count", count, 1, num_experts)
    scaling = check_number("scaling", scaling)
    if first is not None:
        check_rank(0, first=first)
        check_indices(first=first)
    if (bias is None) == (expert_ids is None):
        given = "neither" if bias is None else "both"
        raise ValueError(f"give one of bias and expert_ids, got {given}")
    if bias is not None:
        check_shape("bias", bias, (num_experts,), "E")
        check_floats(bias=bias)
    if expert_ids is not None:
        check_indices(expert_ids=expert_ids)
        check_same_length("T", logits=logits, expert_ids=expert_ids)
        check_shape("expert_ids", expert_ids, (logits.shape[0], count), "T, count")
    if segment_ids is not None:
        check_rank(1, segment_ids=segment_ids)
        check_indices(segment_ids=segment_ids)
        check_same_length("T", logits=logits, segment_ids=segment_ids)
    implementation = resolve(
        "pick_experts", backend, _IMPLEMENTATIONS, arguments={"logits": logits}
    )
    arguments = Arguments(logits, bias, expert_ids, count, scaling, first, segment_ids)
    return implementation(jax_arrays(arguments))
