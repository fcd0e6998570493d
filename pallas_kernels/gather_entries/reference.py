"""Definition of `gather_entries` and `gather_window`: stored vectors to dense ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.addressing import locate_entries, read_rows
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.common.rounding import round_to


def gather_entries(
    pool: LayerPlanes, call: CallIndices, index: jax.Array, *, dim: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Dense entries and which of them there are; the others are zeros, whatever storage holds."""
    entries_per_block = first_plane(pool.planes).shape[2]
    blocks, offsets = locate_entries(call.block_table, call.segment_ids, index, entries_per_block)
    valid = blocks >= 0  # bool[T, K]
    stored = read_rows(pool.planes, pool.layer, blocks, offsets)  # planes [T, K, ...]
    decoded = pool.codec.decode(stored, dim)  # f32[T, K, C]
    return round_to(jnp.where(valid[..., None], decoded, 0.0), dtype), valid


def gather_window(
    ring: LayerPlanes,
    rows: Planes,
    call: CallIndices,
    *,
    tokens: jax.Array | None = None,
    dim: int,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """The window of each token, in the order of ring rows.

    With `tokens` i32[n] the arrays of `call` are those of n of its tokens; `rows` is of all.

    Ring row s holds, for the token at p, position p - (p - s) % W. It lies among the call's own
    rows, that many before the token's, if it is not below the length before the call, else in
    the ring.

        W = 4, 6 tokens stored, token at p = 7 (second of its call)
        row        0      1      2      3
        position   4      5      6      7
        from       ring   ring   call   call
    """
    window = first_plane(ring.planes).shape[2]
    row = jnp.arange(window, dtype=jnp.int32)[None]  # i32[1, W]
    age = (call.positions[:, None] - row) % window  # i32[n, W]
    position = call.positions[:, None] - age  # i32[n, W]
    valid = (position >= 0) & (call.slots >= 0)[:, None]  # bool[n, W]
    in_call = position >= call.lengths[:, None]  # bool[n, W]
    tokens = jnp.arange(call.slots.shape[0]) if tokens is None else tokens
    token = jnp.maximum(tokens[:, None] - age, 0)  # i32[n, W], rows of the call
    stored = read_rows(
        ring.planes,
        ring.layer,
        jnp.broadcast_to(call.slots[:, None], age.shape),
        jnp.broadcast_to(row, age.shape),
    )
    decoded = jnp.where(
        in_call[..., None],
        ring.codec.decode({name: plane[token] for name, plane in rows.items()}, dim),
        ring.codec.decode(stored, dim),
    )
    return round_to(jnp.where(valid[..., None], decoded, 0.0), dtype), valid
