"""Definition of `index_topk`: scores of every visible key, and the K best entries.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.index_scores.reference import count_entries, map_scores
from pallas_kernels.select_top_k.reference import select_all, select_top_k


def select_visible(visible: jax.Array, num_entries: int, k: int) -> jax.Array:
    """i32[T, k], all that is visible, where a table row holds no more than k entries."""
    seen = select_all(visible, num_entries)  # i32[T, E]
    return jnp.pad(seen, [(0, 0), (0, k - num_entries)], constant_values=-1)


def index_topk(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices, *, k: int
) -> jax.Array:
    """Scores each token against the keys of its own request and selects the k best.

    Where no query can see more than k entries, all visible ones are selected without scores.
    """
    visible, num_entries = count_entries(pool, call)  # i32[T] and E
    if num_entries <= k:
        return select_visible(visible, num_entries, k)
    return map_scores(
        queries,
        weights,
        pool,
        dataclasses.replace(call, visible=visible),
        lambda scores, visible: select_top_k(scores, visible, k),  # [n, E] -> [n, k]
    )
