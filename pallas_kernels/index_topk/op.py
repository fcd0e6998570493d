"""Selects the K entries that a CSA query attends to."""

from __future__ import annotations

import jax

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import check_integer, check_queries, first_plane
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.index_scores import tiling as scores_tiling
from pallas_kernels.index_topk import mosaic_gpu, reference
from pallas_kernels.select_top_k import mosaic_gpu as select_kernel

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.index_topk,
    Backend.MOSAIC_GPU: mosaic_gpu.index_topk,
}


def index_topk(
    queries: jax.Array,
    weights: jax.Array,
    pool: LayerPlanes,
    call: CallIndices,
    *,
    k: int,
    backend: Backend | None = None,
) -> jax.Array:
    """Scores every visible index key of a query's request and selects the best.

    In plain JAX, but for the memory that it takes:

        scores = index_scores(queries, weights, pool, call)                 # f32[T, E]
        selected = select_top_k(scores, call.visible, k)                    # i32[T, k]

    Args:
      queries: [T, IH, IC], rotated and rounded as the keys are.
      weights: f32[T, IH], head weights, may be negative.
      pool: planes [L, NB, EB, ...] of index keys.
      call: where the queries belong. A query sees the first `visible` entries of the row of
        `block_table` of its segment, and none where that is -1.
      k: number to select.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      i32[T, k], logical entry numbers, ascending, then -1. By score, the lower index first among
      equals; +0 and -0 are equal, minus infinity is a score, NaN ranks below it.

    Raises:
      ValueError: a shape or dtype is wrong, or the call does not say what is visible.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md section 3; architecture.md section 4.
    """
    check_queries(queries, weights, pool, call)
    k = check_integer("k", k, 1)
    entries_per_block = first_plane(pool.planes).shape[2]
    obstacle = scores_tiling.find_obstacle(queries, pool.codec, entries_per_block)
    scores_all = call.block_table.shape[1] * entries_per_block > k  # else all that is visible
    if scores_all and obstacle is None:
        obstacle = select_kernel.find_obstacle(k)
    implementation = resolve(
        "index_topk",
        backend,
        _IMPLEMENTATIONS,
        preferred=Backend.MOSAIC_GPU if scores_all else Backend.REFERENCE,
        obstacle=obstacle,
        arguments={"queries": queries, "block_table": call.block_table} | pool.planes,
    )
    return implementation(*jax_arrays(queries, weights, pool, call), k=k)
