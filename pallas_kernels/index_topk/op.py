"""Selects the K entries that a CSA query attends to."""

from __future__ import annotations

import jax

from pallas_kernels.common.backend import Backend, resolve
from pallas_kernels.common.checks import check_codec, check_indices, check_rank, check_same_length
from pallas_kernels.common.codecs import Codec, Planes
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
    pool: Planes,
    block_table: jax.Array,
    *,
    request_ids: jax.Array,
    visible: jax.Array,
    layer: jax.Array,
    codec: Codec,
    k: int,
    backend: Backend | None = None,
) -> jax.Array:
    """Scores every visible index key of a query's request and selects the best.

    Args:
      queries: f32[T, IH, IC], rotated and rounded as the keys are.
      weights: f32[T, IH], head weights, may be negative.
      pool: planes [L, NB, EB, ...] of index keys.
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      request_ids: i32[T], row of the table each query reads; -1 sees nothing.
      visible: i32[T], number of entries each query may see.
      layer: i32[], index into L.
      codec: how the planes store a key.
      k: number to select.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      i32[T, k], logical entry numbers, ascending, then -1. By score, the lower index first among
      equals; +0 and -0 are equal, minus infinity is a score, NaN ranks below it.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md section 3; architecture.md section 4.
    """
    check_rank(3, queries=queries)
    check_rank(2, weights=weights, block_table=block_table)
    check_same_length(
        "T", queries=queries, weights=weights, request_ids=request_ids, visible=visible
    )
    check_indices(block_table=block_table, request_ids=request_ids, visible=visible)
    if weights.shape != queries.shape[:2]:
        raise ValueError(
            f"queries and weights must agree on IH, got {queries.shape=} and {weights.shape=}"
        )
    check_codec("pool", pool, codec, queries.shape[-1])
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    obstacle = scores_tiling.find_obstacle(queries, codec, jax.tree.leaves(pool)[0].shape[2])
    if backend == Backend.MOSAIC_GPU and obstacle is not None:
        raise NotImplementedError(f"'mosaic_gpu' index_topk {obstacle}; pass backend='reference'")
    has_kernel = obstacle is None and k <= select_kernel.MAX_K
    preferred = Backend.MOSAIC_GPU if has_kernel else Backend.REFERENCE
    return resolve("index_topk", backend, _IMPLEMENTATIONS, preferred=preferred)(
        queries,
        weights,
        pool,
        block_table,
        request_ids=request_ids,
        visible=visible,
        layer=layer,
        codec=codec,
        k=k,
    )
