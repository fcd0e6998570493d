"""What a token's program does with its queries and its window entry, inside a Triton kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import rotary_tile, triton
from pallas_kernels.flush_write import tile as entry_tile
from pallas_kernels.formats import Codec

Ref = Any
_HEADS = 8
"""Of a program: at 64 heads and one token the programs still spread over the SMs."""


def num_head_tiles(num_heads: int) -> int:
    """Programs that a token's queries take."""
    return -(-num_heads // _HEADS)


def turn_heads(
    source: Ref,
    target: Ref,
    frequencies: Ref,
    token: jax.Array,
    head_tile: jax.Array,
    position: jax.Array,
    *,
    eps: float,
) -> None:
    """Norms and rotates a few heads of a token: from [T, H, C] to the same place."""
    num_heads, dim = source.shape[1:]
    width = max(128, 1 << (dim - 1).bit_length())
    turn = rotary_tile.load_turn(
        None, frequencies, dim=dim, width=width, dtype=source.dtype, eps=eps
    )
    shape = (_HEADS, width)
    head = head_tile * _HEADS + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = (head < num_heads) & (lane < dim)
    index = (token, jnp.minimum(head, num_heads - 1), jnp.minimum(lane, dim - 1))
    x = triton.load_where(source, index, mask).astype(jnp.float32)
    turned = rotary_tile.norm_and_rotate(x, turn, position)
    triton.store_where(target, index, turned.astype(target.dtype), mask)


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
    turn = rotary_tile.load_turn(norm, frequencies, dim=dim, width=width, dtype=kv.dtype, eps=eps)
    row = triton.load_row(kv, (token,), start=0, count=dim, width=width).astype(jnp.float32)
    turned = rotary_tile.norm_and_rotate(row, turn, position)
    return entry_tile.encode(codec, turned, dim=dim, rope_dim=rope_dim)
