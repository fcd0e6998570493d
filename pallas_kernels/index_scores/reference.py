"""Definition of index scores.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.chunks import map_tokens
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gather_entries.reference import gather_entries
from pallas_kernels.select_top_k.reference import select_all


def index_scores(queries: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """score[e] = sum_h w[h] relu(q[h] . k[e]) / sqrt(IC * IH), in f32; leading axes broadcast.

    Args:
      queries: f32 or bf16[..., IH, IC], rotated and rounded as the keys are.
      weights: f32[..., IH], may be negative.
      keys: f32[..., E, IC].

    Returns:
      f32[..., E].
    """
    highest = jax.lax.Precision.HIGHEST
    num_heads, dim = queries.shape[-2:]
    transposed = queries.astype(jnp.float32).mT  # f32[..., IC, IH]
    products = jax.nn.relu(jnp.matmul(keys, transposed, precision=highest))  # f32[..., E, IH]
    scaled = weights * np.float32((num_heads * dim) ** -0.5)  # f32[..., IH]
    return jnp.sum(products * scaled[..., None, :], axis=-1)


def score_pool(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices
) -> jax.Array:
    """See `op.index_scores`; entries that are not visible score as a key of zeros, 0."""
    return map_scores(queries, weights, pool, call, lambda scores, _: scores)


def listed_scores(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices, listed: jax.Array
) -> jax.Array:
    """See `op.listed_scores`; some tokens at a time."""
    places = {
        "queries": queries,
        "weights": weights,
        "segment_ids": call.segment_ids,
        "listed": listed,
    }

    def score(some: dict[str, jax.Array], _: jax.Array) -> jax.Array:
        here = dataclasses.replace(call, segment_ids=some["segment_ids"])  # of n tokens
        dense = {"dim": queries.shape[-1], "dtype": jnp.float32}
        keys, _ = gather_entries(pool, here, some["listed"], **dense)  # f32[n, K, IC]
        return index_scores(some["queries"], some["weights"], keys)  # f32[n, K]

    return map_tokens(score, places, elements_per_token=listed.shape[1] * queries.shape[-1])


def map_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: LayerPlanes,
    call: CallIndices,
    function: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """function(scores f32[n, E], visible i32[n]) -> [n, ...], some tokens at a time; [T, ...]."""
    assert call.visible is not None  # the op checks
    num_entries = count_entries(pool, call)[1]
    places = {
        "queries": queries,
        "weights": weights,
        "segment_ids": call.segment_ids,
        "visible": call.visible,
    }

    def map_some(some: dict[str, jax.Array], _: jax.Array) -> jax.Array:
        # f32[n, E, IC], all entries of a table row; those that are not visible are zeros.
        keys, _ = gather_entries(
            pool,
            dataclasses.replace(call, segment_ids=some["segment_ids"]),
            select_all(some["visible"], num_entries),
            dim=queries.shape[-1],
            dtype=jnp.float32,
        )
        return function(index_scores(some["queries"], some["weights"], keys), some["visible"])

    return map_tokens(map_some, places, elements_per_token=num_entries * queries.shape[-1])


def count_entries(pool: LayerPlanes, call: CallIndices) -> tuple[jax.Array, int]:
    """i32[T], entries that each token may see, none for padding; and those of a whole table row."""
    assert call.visible is not None  # the op checks
    visible = jnp.where(call.segment_ids >= 0, call.visible, 0)
    return visible, call.block_table.shape[1] * first_plane(pool.planes).shape[2]
