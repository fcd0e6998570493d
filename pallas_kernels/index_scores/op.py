"""Scores of stored index keys; checks, chooses a backend, calls it."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import (
    check_indices,
    check_queries,
    check_rank,
    check_same_length,
    first_plane,
)
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.index_scores import mosaic_gpu, reference, tiling, triton_listed

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.score_pool,
    Backend.MOSAIC_GPU: mosaic_gpu.index_scores,
}
_LISTED = {
    Backend.REFERENCE: reference.listed_scores,
    Backend.TRITON_GPU: triton_listed.listed_scores,
}


def index_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: LayerPlanes,
    call: CallIndices,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Scores every visible index key of a query's request.

    In plain JAX, with E = LB * EB and keys as `gather_entries` gives them:

        entry = jnp.broadcast_to(jnp.arange(E, dtype=jnp.int32), (T, E))
        keys, _ = gather_entries(pool, call, entry, dim=IC)                 # f32[T, E, IC]
        products = jax.nn.relu(jnp.einsum("thc,tec->teh", queries, keys))   # f32[T, E, IH]
        scores = jnp.einsum("teh,th->te", products, weights) * (IC * IH) ** -0.5

    Args:
      queries: as of `index_topk`, like all that follows.
      weights: head weights.
      pool: index keys.
      call: where the queries belong.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      f32[T, E], E the entries of a table row, LB * EB; arbitrary where an entry is not visible,
      which `select_top_k` does not read.

    Raises:
      ValueError: a shape or dtype is wrong, or the call does not say what is visible.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md section 3.
    """
    check_queries(queries, weights, pool, call)
    visible, num_entries = reference.count_entries(pool, call)
    implementation = resolve(
        "index_scores",
        backend,
        _IMPLEMENTATIONS,
        obstacle=tiling.find_obstacle(queries, pool.codec, first_plane(pool.planes).shape[2]),
        arguments={"queries": queries, "block_table": call.block_table} | pool.planes,
    )
    call = dataclasses.replace(call, visible=visible)
    scores = implementation(*jax_arrays(queries, weights, pool, call))
    return scores[:, :num_entries]


def listed_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: LayerPlanes,
    call: CallIndices,
    listed: jax.Array,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Scores some entries of each token, of which alone index keys are read.

    In plain JAX, of all scores: `jnp.take_along_axis(index_scores(...), listed, axis=1)`.

    Args:
      queries: as of `index_scores`, like all that follows.
      weights: head weights.
      pool: index keys.
      call: where the queries belong; `visible` is not read.
      listed: i32[T, n], entries of the row of `block_table` of each token's segment; -1 is none.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      f32[T, n]; 0 where no entry is listed, or there is none.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v41.md section 7.
    """
    check_queries(queries, weights, pool, dataclasses.replace(call, visible=call.segment_ids))
    check_rank(2, listed=listed)
    check_indices(listed=listed)
    check_same_length("T", queries=queries, listed=listed)
    implementation = resolve(
        "listed_scores",
        backend,
        _LISTED,
        obstacle=triton_listed.find_obstacle(queries, pool.codec),
        arguments={"queries": queries, "listed": listed} | pool.planes,
    )
    return implementation(*jax_arrays(queries, weights, pool, call, listed))
