"""Definition of `flush_write`: encoded entries into their blocks."""

from __future__ import annotations

import jax

from pallas_kernels.formats import Planes
from pallas_kernels.paging import locate_entries, scatter_rows


def flush_write(
    pool: Planes,
    rows: Planes,
    block_table: jax.Array,
    request_ids: jax.Array,
    entries: jax.Array,
    *,
    layer: jax.Array,
) -> Planes:
    """Entry j of a request goes to block `table[j // EB]`, offset `j % EB`."""
    entries_per_block = jax.tree.leaves(pool)[0].shape[2]
    blocks, offsets = locate_entries(block_table, request_ids, entries, entries_per_block)
    return scatter_rows(pool, rows, layer, blocks, offsets)
