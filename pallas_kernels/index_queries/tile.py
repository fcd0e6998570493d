"""What a program does with a few index heads of a token, inside a Triton kernel."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import head_tile, rotary_tile
from pallas_kernels.codecs import Codec
from pallas_kernels.flush_write import tile as entry_tile

Ref = Any


def round_heads(
    source: Ref,
    target: Ref,
    frequencies: Ref,
    token: jax.Array,
    number: jax.Array,
    position: jax.Array,
    *,
    codec: Codec,
) -> None:
    """Rotates and rounds: from [T, IH, IC] to the same place of f32[T, IH, IC]."""
    dim = source.shape[2]
    width = entry_tile.tile_width(codec, dim)
    turn = rotary_tile.load_turn(None, frequencies, dim=dim, width=width, dtype=source.dtype)
    head_tile.map_heads(
        lambda x: entry_tile.round_through(codec, rotary_tile.rotate(x, turn, position), dim=dim),
        source,
        target,
        token,
        number,
        width=width,
    )
