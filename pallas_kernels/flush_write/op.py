"""Writes finished entries to their blocks."""

from __future__ import annotations

import jax

from pallas_kernels.backend import Backend, resolve
from pallas_kernels.checks import (
    check_indices,
    check_planes,
    check_rank,
    check_same_length,
    first_plane,
)
from pallas_kernels.flush_write import reference
from pallas_kernels.formats import Planes

_IMPLEMENTATIONS = {Backend.REFERENCE: reference.flush_write}


def flush_write(
    pool: Planes,
    rows: Planes,
    block_table: jax.Array,
    request_ids: jax.Array,
    entries: jax.Array,
    *,
    layer: jax.Array,
    backend: Backend | None = None,
) -> Planes:
    """Scatters encoded entries, or index keys, through the block table.

    Args:
      pool: planes [L, NB, EB, ...].
      rows: planes [n, ...].
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      request_ids: i32[n], row of the table; -1 writes nothing.
      entries: i32[n], logical entry numbers; -1, or one without a block, writes nothing.
      layer: i32[], index into L.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The pool with the rows written.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: original_cache.md, flush; deepseek_v4.md section 2.4.
    """
    check_planes(pool, rows, stacked_name="pool", rows_name="rows")
    check_rank(2, block_table=block_table)
    check_same_length("n", request_ids=request_ids, entries=entries, rows=first_plane(rows))
    check_indices(block_table=block_table, request_ids=request_ids, entries=entries)
    return resolve("flush_write", backend, _IMPLEMENTATIONS)(
        pool, rows, block_table, request_ids, entries, layer=layer
    )
