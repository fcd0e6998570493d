"""Scores by one kernel, selection by another, for Hopper and Blackwell.

The scores between them, 4 bytes an entry beside the 68 or 132 of its key, stay in the L2 cache for
all but the largest calls. Where all that is visible is selected nothing is scored.

Source: deepseek_v4.md section 3; architecture.md section 4.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.index_scores.reference import count_entries
from pallas_kernels.index_topk.reference import select_visible
from pallas_kernels.select_top_k import mosaic_gpu as select_kernel


def index_topk(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices, *, k: int
) -> jax.Array:
    """See `op.index_topk`."""
    visible, num_entries = count_entries(pool, call)
    if num_entries <= k:
        return select_visible(visible, num_entries, k)
    scores = scores_kernel.index_scores(
        queries,
        weights.astype(jnp.float32),
        pool,
        dataclasses.replace(call, visible=visible),
    )
    return select_kernel.select_top_k(scores, jnp.minimum(visible, num_entries), k)
