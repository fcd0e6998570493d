"""Scores by one kernel, selection by another, for Hopper.

The scores between them, 4 bytes an entry beside the 68 or 132 of its key, stay in the L2 cache for
all but the largest calls.

Source: deepseek_v4.md section 3; architecture.md section 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.select_top_k import mosaic_gpu as select_kernel
from pallas_kernels.select_top_k.reference import select_all


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
) -> jax.Array:
    """See `op.index_topk`."""
    visible = jnp.where(request_ids >= 0, visible, 0)
    num_entries = block_table.shape[1] * jax.tree.leaves(pool)[0].shape[2]
    if num_entries <= k:
        seen = select_all(visible, num_entries)
        return jnp.pad(seen, [(0, 0), (0, k - num_entries)], constant_values=-1)
    scores = scores_kernel.index_scores(
        queries.astype(jnp.float32),
        weights.astype(jnp.float32),
        pool,
        block_table,
        request_ids=request_ids,
        visible=visible,
        layer=layer,
        codec=codec,
    )
    return select_kernel.select_top_k(scores, jnp.minimum(visible, num_entries), k)
