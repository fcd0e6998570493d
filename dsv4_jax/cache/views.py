"""What a layer stores, as plain arrays: the views that a handle reads out."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.codecs import Planes


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
