"""Definition of `gather_entries` and `gather_window`: stored vectors to dense ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.addressing import locate_entries, read_rows
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.rounding import round_to


def gather_entries(
    pool: Planes,
    block_table: jax.Array,
    request_ids: jax.Array,
    index: jax.Array,
    *,
    layer: jax.Array,
    codec: Codec,
    dim: int,
    dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Dense entries and which of them there are; the others are zeros, whatever storage holds."""
    entries_per_block = jax.tree.leaves(pool)[0].shape[2]
    blocks, offsets = locate_entries(block_table, request_ids, index, entries_per_block)
    valid = blocks >= 0
    decoded = codec.decode(read_rows(pool, layer, blocks, offsets), dim)
    return round_to(jnp.where(valid[..., None], decoded, 0.0), dtype), valid


def gather_window(
    ring: Planes,
    rows: Planes,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    layer: jax.Array,
    codec: Codec,
    dim: int,
    dtype: DTypeLike = jnp.float32,
    tokens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The window of each token, in the order of ring rows; `tokens` i32[n] if not of all of them.

    Ring row s holds, for the token at p, position p - (p - s) % W. It lies among the call's own
    rows, that many before the token's, if it is not below the length before the call, else in
    the ring.

        W = 4, 6 tokens stored, token at p = 7 (second of its call)
        row        0      1      2      3
        position   4      5      6      7
        from       ring   ring   call   call
    """
    window = jax.tree.leaves(ring)[0].shape[2]
    row = jnp.arange(window, dtype=jnp.int32)[None]
    age = (positions[:, None] - row) % window
    position = positions[:, None] - age
    valid = (position >= 0) & (slots >= 0)[:, None]
    in_call = position >= lengths[:, None]
    tokens = jnp.arange(slots.shape[0]) if tokens is None else tokens
    token = jnp.maximum(tokens[:, None] - age, 0)
    stored = read_rows(
        ring,
        layer,
        jnp.broadcast_to(slots[:, None], age.shape),
        jnp.broadcast_to(row, age.shape),
    )
    decoded = jnp.where(
        in_call[..., None],
        codec.decode({name: plane[token] for name, plane in rows.items()}, dim),
        codec.decode(stored, dim),
    )
    return round_to(jnp.where(valid[..., None], decoded, 0.0), dtype), valid
