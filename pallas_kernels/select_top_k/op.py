"""The K best of scores that are there already."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_indices,
    check_integer,
    check_rank,
    check_same_length,
)
from pallas_kernels.select_top_k import mosaic_gpu as select_kernel
from pallas_kernels.select_top_k import reference

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.select_top_k,
    Backend.MOSAIC_GPU: select_kernel.select_top_k,
}


def select_top_k(
    scores: jax.Array, visible: jax.Array, k: int, *, backend: Backend | None = None
) -> jax.Array:
    """Selects the best entries of each row.

    In plain JAX, where k entries are visible and none is NaN:

        seen = jnp.arange(scores.shape[1]) < visible[:, None]               # bool[T, E]
        best = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), k)[1]       # i32[T, k]
        selected = jnp.sort(best)

    Args:
      scores: f32[T, E].
      visible: i32[T]; a query sees entries 0 .. visible - 1 and at most E. The others are not read.
      k: number to select, 1 or more.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      i32[T, k], entry numbers, ascending, then -1. By score, the lower index first among equals;
      +0 and -0 are equal, minus infinity is a score, NaN ranks below it.

    Raises:
      ValueError: a shape or dtype is wrong, or k is less than 1.
      NotImplementedError: the named backend can't run here, or not with so large a k.

    Source: architecture.md section 4.
    """
    check_rank(2, scores=scores)
    check_same_length("T", scores=scores, visible=visible)
    check_rank(1, visible=visible)
    check_indices(visible=visible)
    if scores.dtype != jnp.float32:
        raise ValueError(f"scores must be float32, got {scores.dtype}")
    k = check_integer("k", k, 1)
    there = min(k, scores.shape[1])
    implementation = resolve(
        "select_top_k",
        backend,
        _IMPLEMENTATIONS,
        obstacle=select_kernel.find_obstacle(there),
        arguments={"scores": scores},
    )
    scores, visible = jax_arrays(scores, visible)
    selected = implementation(scores, visible, there)
    return jnp.pad(selected, [(0, 0), (0, k - there)], constant_values=-1)
