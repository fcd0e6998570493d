"""Attention where a request's blocks are dealt over devices: each attends to its own entries."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax.cache import block_split
from dsv4_jax.collectives import exchange_over_model, gather_in_one
from dsv4_jax.mesh import MODEL, axis_size, place_on
from pallas_kernels.common.call import CallIndices

if TYPE_CHECKING:
    from dsv4_jax.cache.handle import LayerCacheHandle


def own_call(handle: LayerCacheHandle, visible: jax.Array) -> CallIndices:
    """The call as an op takes it that reads the blocks of this device."""
    per_block = handle.schema.entries_per_block
    return dataclasses.replace(
        handle.call,
        block_table=block_split.own_table(handle.call.block_table, handle.blocks.num_blocks),
        visible=block_split.count_own(visible, per_block),
    )


def attend_in_parts(
    handle: LayerCacheHandle,
    queries: jax.Array,
    sink: jax.Array,
    own: jax.Array,
    count: jax.Array,
    frequencies: jax.Array | None,
) -> jax.Array:
    """Every device attends with all heads to its own entries, and gets its heads' results.

    Args:
      handle: after the call's tokens were appended.
      queries: [T, H, C], of this device or of all.
      sink: f32[H], of this device.
      own: i32[T, K], entries by their numbers here, ascending, then -1.
      count: i32[T], how many they are.
      frequencies: as of `LayerCacheHandle.attend`.
    """
    num_heads, parts = sink.shape[0], axis_size(MODEL)
    if queries.shape[1] == num_heads:
        queries = block_split.join_heads(*gather_in_one(queries))
    call = own_call(handle, handle.visible_entries)
    counts_window = place_on(MODEL) == 0  # every device has all of it
    part = pk.attend_in_part(
        queries,
        handle.ring,
        handle.own_window,
        handle.stored_entries,
        own,
        dataclasses.replace(
            call, visible=count, positions=jnp.where(counts_window, call.positions, -1)
        ),
        scale=handle.schema.entry_head_dim**-0.5,
        apart=handle.is_apart,
    )
    exchanged = jnp.concatenate([part.sums, jnp.moveaxis(part.statistics, 1, 2)], axis=2)
    exchanged = exchanged.reshape(exchanged.shape[0], parts, num_heads, -1)
    exchanged = exchange_over_model(jnp.moveaxis(exchanged, 1, 0))
    return pk.join_parts(
        pk.AttentionPart(exchanged[..., :-2], jnp.moveaxis(exchanged[..., -2:], 3, 2)),
        sink,
        handle.call.positions,
        frequencies,
        dtype=queries.dtype,
    )
