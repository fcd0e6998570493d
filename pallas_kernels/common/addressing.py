"""Index arithmetic that references share: stacked planes, ring rows, entries through block tables.

An array family is stacked by layer: [L, ...]. Ops take the stacked array and a layer number, so
that one buffer serves all layers and a scatter is in place. An index of -1 selects or writes
nothing; since -1 wraps in JAX even with `mode="drop"`, every function here masks first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.codecs import Planes


def drop_absent(index: jax.Array, size: int, *, is_there: jax.Array | None = None) -> jax.Array:
    """An index for a scatter with `mode="drop"`: one that is absent becomes `size`.

    That is beyond the axis, so nothing is written. -1 itself would be the last row.

    Args:
      index: i32[...], -1 where there is nothing to write.
      size: of the axis that is indexed.
      is_there: bool[...], where there is; None is where the index is no -1.
    """
    return jnp.where(index >= 0 if is_there is None else is_there, index, size)


def write_rows(
    stacked: Planes, rows: Planes, layer: jax.Array, first: jax.Array, second: jax.Array
) -> Planes:
    """Writes rows[i] to stacked[layer, first[i], second[i]]; rows with first -1 write nothing.

    Args:
      stacked: planes [L, A, B, ...].
      rows: planes [n, ...].
      layer: i32[].
      first: i32[n].
      second: i32[n].
    """

    def write(plane: jax.Array, row: jax.Array) -> jax.Array:
        target = plane.at[layer, drop_absent(first, plane.shape[1]), second]
        return target.set(row.astype(plane.dtype), mode="drop", wrap_negative_indices=False)

    return {name: write(plane, rows[name]) for name, plane in stacked.items()}


def read_rows(stacked: Planes, layer: jax.Array, first: jax.Array, second: jax.Array) -> Planes:
    """stacked[layer, first, second] for i32 indices of any shape; what first -1 gives is arbitrary.

    The caller masks it: the rows come from index 0 and may hold anything, NaN included.
    """
    safe = jnp.maximum(first, 0)
    return {
        name: plane.at[layer, safe, second].get(wrap_negative_indices=False)
        for name, plane in stacked.items()
    }


def locate_entries(
    block_table: jax.Array, segment_ids: jax.Array, entries: jax.Array, entries_per_block: int
) -> tuple[jax.Array, jax.Array]:
    """Where logical entries lie.

    Args:
      block_table: i32[B, LB], -1 where there is no block.
      segment_ids: i32[n], row of the table, -1 for none.
      entries: i32[n, ...], logical entry numbers, -1 for none.
      entries_per_block: EB.

    Returns:
      Physical blocks i32[n, ...], -1 where the segment, the entry or its block is absent, and
      offsets i32[n, ...] in the block.
    """
    extra = (1,) * (entries.ndim - segment_ids.ndim)
    rows = segment_ids.reshape(*segment_ids.shape, *extra)
    logical = entries // entries_per_block
    inside = (rows >= 0) & (entries >= 0) & (logical < block_table.shape[1])
    blocks = block_table[jnp.maximum(rows, 0), jnp.where(inside, logical, 0)]
    return jnp.where(inside, blocks, -1), jnp.where(inside, entries % entries_per_block, 0)
