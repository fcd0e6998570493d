"""What a token's program does with its queries and its window entry, inside a Triton kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import triton, triton_heads, triton_rope
from pallas_kernels.gpu import triton_codecs as entry_tile

Ref = Any


def turn_heads(
    source: Ref,
    target: Ref,
    frequencies: Ref,
    token: jax.Array,
    number: jax.Array,
    position: jax.Array,
    *,
    eps: float,
) -> None:
    """Norms and rotates a few heads of a token: from [T, H, C] to the same place."""
    dim = source.shape[2]
    width = max(128, 1 << (dim - 1).bit_length())
    turn = triton_rope.load_turn(
        None, frequencies, dim=dim, width=width, dtype=source.dtype, eps=eps
    )
    triton_heads.map_heads(
        lambda x: triton_rope.norm_and_rotate(x, turn, position),
        source,
        target,
        token,
        number,
        width=width,
    )


def encode_entry(
    kv: Ref,
    norm: Ref,
    frequencies: Ref,
    token: jax.Array,
    position: jax.Array,
    *,
    codec: Codec,
    eps: float,
) -> dict[str, entry_tile.Lanes]:
    """A token's window entry: kv [T, C], normed with a weight [C], rotated and encoded."""
    dim, rope_dim = kv.shape[1], 2 * frequencies.shape[0]
    width = entry_tile.tile_width(codec, dim)
    turn = triton_rope.load_turn(norm, frequencies, dim=dim, width=width, dtype=kv.dtype, eps=eps)
    row = triton.load_row(kv, (token,), start=0, count=dim, width=width).astype(jnp.float32)
    turned = triton_rope.norm_and_rotate(row, turn, position)
    return entry_tile.encode(codec, turned, dim=dim, rope_dim=rope_dim)
