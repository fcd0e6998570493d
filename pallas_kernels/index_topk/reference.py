"""Definition of `index_topk`: scores of every visible key, and the K best entries.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.chunks import map_tokens
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gather_entries.reference import gather_entries
from pallas_kernels.index_scores.reference import index_scores
from pallas_kernels.select_top_k.reference import select_all, select_top_k


def count_entries(pool: LayerPlanes, call: CallIndices) -> tuple[jax.Array, int]:
    """i32[T], entries that each token may see, none for padding; and those of a whole table row."""
    assert call.visible is not None  # the op checks
    visible = jnp.where(call.segment_ids >= 0, call.visible, 0)
    return visible, call.block_table.shape[1] * first_plane(pool.planes).shape[2]


def select_visible(visible: jax.Array, num_entries: int, k: int) -> jax.Array:
    """i32[T, k], all that is visible, where a table row holds no more than k entries."""
    seen = select_all(visible, num_entries)
    return jnp.pad(seen, [(0, 0), (0, k - num_entries)], constant_values=-1)


def index_topk(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices, *, k: int
) -> jax.Array:
    """Scores each token against the keys of its own request and selects the k best.

    Where no query can see more than k entries, all visible ones are selected without scores.
    """
    visible, num_entries = count_entries(pool, call)
    if num_entries <= k:
        return select_visible(visible, num_entries, k)
    places = {
        "queries": queries,
        "weights": weights,
        "segment_ids": call.segment_ids,
        "visible": visible,
    }

    def select_some(some: dict[str, jax.Array], _: jax.Array) -> jax.Array:
        keys, _ = gather_entries(
            pool,
            dataclasses.replace(call, segment_ids=some["segment_ids"]),
            select_all(some["visible"], num_entries),
            dim=queries.shape[-1],
            dtype=jnp.float32,
        )
        scores = index_scores(some["queries"], some["weights"], keys)
        return select_top_k(scores, some["visible"], k)

    return map_tokens(select_some, places, elements_per_token=num_entries * queries.shape[-1])
