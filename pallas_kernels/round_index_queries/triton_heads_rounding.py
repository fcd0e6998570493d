"""What a program does with a few index heads of a token, inside a Triton kernel."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import triton_codecs as entry_tile
from pallas_kernels.gpu import triton_heads, triton_rope

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
    turn = triton_rope.load_turn(None, frequencies, dim=dim, width=width, dtype=source.dtype)
    triton_heads.map_heads(
        lambda x: entry_tile.round_through(codec, triton_rope.rotate(x, turn, position), dim=dim),
        source,
        target,
        token,
        number,
        width=width,
    )
