"""What a layer stores, as plain arrays: the original cache's views, and how they are read."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.cache.handle import LayerCacheHandle
from pallas_kernels.common.codecs import FP4KeyCodec, Planes


class SWAView(NamedTuple):
    """A layer's window ring; a field that the format does not have is None.

    Attributes:
      fp8: u8[NS, W, N], E4M3 codes of the nope dims.
      rope: bf16[NS, W, R].
      inv_scale: f32[NS, W], of "fp8_per_entry".
      positions: i32[B, W], position in each ring row of each request row; -1 where empty.
      head: i32[B], the ring row that the next token goes to.
      slots: i32[B], slot of each request row.
      planes: every array of the format, [NS, W, ...].
    """

    fp8: jax.Array | None
    rope: jax.Array | None
    inv_scale: jax.Array | None
    positions: jax.Array
    head: jax.Array
    slots: jax.Array
    planes: Planes


class ClassicalView(NamedTuple):
    """A layer's entries; a field that the format does not have is None.

    Attributes:
      entries_fp8: u8[NB, EB, N], E4M3 codes of the nope dims.
      entries_rope: bf16[NB, EB, R].
      inv_scale: f32[NB, EB], of "fp8_per_entry".
      block_table: i32[B, LB].
      block_lens: i32[B], blocks of each row that hold tokens.
      planes: every array of the format, [NB, EB, ...].
    """

    entries_fp8: jax.Array | None
    entries_rope: jax.Array | None
    inv_scale: jax.Array | None
    block_table: jax.Array
    block_lens: jax.Array
    planes: Planes


class IndexerView(NamedTuple):
    """A CSA layer's index keys; a field that the format does not have is None.

    Attributes:
      keys_fp4: u8[NB, EB, IC / 2], E2M1 pairs as published, the even code in the low nibble.
      scale: scales of the format, u8 or f32 [NB, EB, ...].
      global_scale: f32[NB], ones, of "fp8_per_entry": derived, not stored.
      block_table: i32[B, LB].
      block_lens: i32[B].
      planes: every array of the format as stored, [NB, EB, ...].
    """

    keys_fp4: jax.Array | None
    scale: jax.Array | None
    global_scale: jax.Array | None
    block_table: jax.Array
    block_lens: jax.Array
    planes: Planes


def read_swa_view(handle: LayerCacheHandle, *, counts_call: bool) -> SWAView:
    """The ring of a layer as stored.

    Args:
      handle: the layer.
      counts_call: the ring holds the call's tokens already.
    """
    call, window = handle.call, handle.schema.swa_window_size
    planes = {name: plane[handle.layer] for name, plane in handle.state.window.items()}
    length = call.row_lengths + (call.row_counts if counts_call else 0)
    age = (length[:, None] - 1 - jnp.arange(window)[None]) % window
    position = length[:, None] - 1 - age
    return SWAView(
        fp8=planes.get("nope"),
        rope=planes.get("rope"),
        inv_scale=planes.get("inv_scale"),
        positions=jnp.where(position >= 0, position, -1),
        head=length % window,
        slots=call.row_slots,
        planes=planes,
    )


def read_classical_view(handle: LayerCacheHandle) -> ClassicalView:
    """The entries of a layer as stored.

    Raises:
      ValueError: the layer has none.
    """
    planes = {name: plane[handle.layer] for name, plane in handle.blocks.entries.items()}
    return ClassicalView(
        entries_fp8=planes.get("nope"),
        entries_rope=planes.get("rope"),
        inv_scale=planes.get("inv_scale"),
        block_table=handle.call.block_table,
        block_lens=block_lens(handle),
        planes=planes,
    )


def read_indexer_view(handle: LayerCacheHandle) -> IndexerView:
    """The index keys of a layer as stored, and FP4 ones as published pairs too.

    Raises:
      ValueError: the layer has none.
    """
    blocks, schema = handle.blocks, handle.schema
    if blocks.index_keys is None:
        raise ValueError(f"a layer of type {schema.attn_type} has no indexer")
    planes = {name: plane[handle.layer] for name, plane in blocks.index_keys.items()}
    codec = schema.format.index_key
    ones = jnp.ones(blocks.num_blocks, jnp.float32)
    return IndexerView(
        keys_fp4=codec.to_pairs(planes["codes"]) if isinstance(codec, FP4KeyCodec) else None,
        scale=planes.get("scale"),
        global_scale=ones if schema.needs_inv_scale else None,
        block_table=handle.call.block_table,
        block_lens=block_lens(handle),
        planes=planes,
    )


def block_lens(handle: LayerCacheHandle) -> jax.Array:
    """i32[B], blocks of each row that hold tokens, the call's included."""
    tokens = handle.call.row_lengths + handle.call.row_counts
    return -(-tokens // handle.schema.block_tokens)
