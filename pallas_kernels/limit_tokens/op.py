"""Which tokens top-k and top-p leave of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_arrays,
    check_indices,
    check_rank,
    check_same_length,
)
from pallas_kernels.limit_tokens import reference, triton_gpu

_MAX_TOKENS = 2**24
_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.limit_tokens,
    Backend.TRITON_GPU: triton_gpu.limit_tokens,
}


def limit_tokens(
    scaled: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Finds the last token that top-k and top-p leave of each row, without sorting it.

    Tokens come in the order of their logits, the lower number first among equals. The mass of a
    token is round(2**30 * exp(scaled)), a whole number, and a row's total is the sum of all of
    them; from 131,072 tokens on the unit is four times larger for each bit more of V. A token is
    left if fewer than k tokens come before it, and less mass than top_p times the total. The first
    one is always left.

    In plain JAX, but for the rounding of masses:

        order = jnp.argsort(-scaled, axis=1, stable=True)                   # i32[T, V]
        ranked = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=1), axis=1)
        before = jnp.cumsum(ranked, axis=1) - ranked                        # f32[T, V]
        left = (before < top_p[:, None]) & (jnp.arange(V) < top_k[:, None])
        last = jnp.take_along_axis(order, jnp.sum(left, axis=1, keepdims=True) - 1, axis=1)[:, 0]
        least = jnp.take_along_axis(scaled, last[:, None], axis=1)[:, 0]

    Args:
      scaled: f32[T, V], logits over the temperature, less the largest of their row: at most 0.
      top_k: i32[T]; 0 is no limit.
      top_p: f32[T]; 1 or more is no limit.
      backend: implementation to use; None picks the fastest one that runs here. All give the same
        bits, of a row the same whatever the others are.

    Returns:
      f32[T] and i32[T], `least` and `last`: the tokens that are left are those of
      `scaled > least`, and of `scaled == least` those of numbers up to `last`. Without a limit,
      minus infinity and V - 1.

    Raises:
      ValueError: a shape or dtype is wrong, or V is not within 1 .. 2**24.
      NotImplementedError: the named backend can't run here.

    Source: architecture.md section 4.
    """
    check_arrays(scaled=scaled, top_p=top_p)
    check_rank(2, scaled=scaled)
    check_rank(1, top_k=top_k, top_p=top_p)
    check_same_length("T", scaled=scaled, top_k=top_k, top_p=top_p)
    check_indices(top_k=top_k)
    for name, array in (("scaled", scaled), ("top_p", top_p)):
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, got {array.dtype}")
    if not 1 <= scaled.shape[1] <= _MAX_TOKENS:
        raise ValueError(f"V must be within 1 .. {_MAX_TOKENS}, got scaled.shape={scaled.shape}")
    implementation = resolve(
        "limit_tokens", backend, _IMPLEMENTATIONS, arguments={"scaled": scaled}
    )
    return implementation(*jax_arrays(scaled, top_k, top_p))
