"""Definition of `append_ring` and `append_running`: new tokens into what a request keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.compress_tail.reference import empty_pool, fold_tokens
from pallas_kernels.formats import Planes
from pallas_kernels.paging import scatter_rows


def append_ring(
    ring: Planes, rows: Planes, slots: jax.Array, positions: jax.Array, *, layer: jax.Array
) -> Planes:
    """Token at position p of a slot goes to ring row p % W.

    W = 4, positions 5 6 7 8 of one request:   row 1 2 3 0
    """
    num_rows = jax.tree.leaves(ring)[0].shape[2]
    return scatter_rows(ring, rows, layer, slots, positions % num_rows)


def append_running(
    running: jax.Array,
    values: jax.Array,
    scores: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    offsets: jax.Array,
    *,
    layer: jax.Array,
    max_count: int,
    rate: int,
) -> jax.Array:
    """Folds each request's new tokens into the running softmax of its open window.

    The window open after the call starts at `(lengths + counts) // rate * rate`; what lies before
    it has been flushed.
    """
    end = lengths + counts
    opened = end // rate * rate
    carried = (opened < lengths)[:, None, None]
    first = jnp.maximum(opened, lengths)
    old = running[layer, jnp.maximum(slots, 0)]
    empty = empty_pool(old.shape[0], old.shape[-1])
    pool = fold_tokens(
        jnp.where(carried, old, empty),
        values,
        scores,
        start=offsets + first - lengths,
        count=end - first,
        max_count=min(max_count, rate),
    )
    writes = jnp.where((slots >= 0) & (counts > 0), slots, running.shape[1])
    return running.at[layer, writes].set(pool, mode="drop")
