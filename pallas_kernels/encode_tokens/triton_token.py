"""What one program does with a token's query heads or its window entry, inside a Triton kernel.

`encode_tokens` and `append_and_flush` share it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import triton, triton_codecs, triton_heads, triton_rope

Ref = Any


def rotate_heads(
    heads: triton_heads.Heads, frequencies: Ref, position: jax.Array, *, eps: float | None
) -> None:
    """Norm and RoPE of a few heads of a token: from [T, H, C] to the same place of the target.

    `eps` is the floor of the norm; None leaves the norm out.
    """
    dim, dtype = heads.source.shape[2], heads.source.dtype
    width = max(128, pl.next_power_of_2(dim))
    table = triton_rope.load_rope_table(
        None, frequencies, dim=dim, width=width, dtype=dtype, eps=eps or 0.0
    )
    turn = triton_rope.rotate if eps is None else triton_rope.norm_and_rotate
    triton_heads.map_heads(lambda x: turn(x, table, position), heads, width=width)


def encode_entry(
    kv: Ref,
    norm: Ref,
    frequencies: Ref,
    token: jax.Array,
    position: jax.Array,
    *,
    codec: Codec,
    eps: float,
) -> dict[str, triton_codecs.Lanes]:
    """A token's window entry: kv [T, C], normed with a weight [C], rotated and encoded."""
    dim, rope_dim = kv.shape[1], 2 * frequencies.shape[0]
    width = triton_codecs.tile_width(codec, dim)
    table = triton_rope.load_rope_table(
        norm, frequencies, dim=dim, width=width, dtype=kv.dtype, eps=eps
    )
    # f32[width], zeros past the C dims: squares of them add nothing.
    row = triton.load_row(kv, (token,), start=0, count=dim, width=width).astype(jnp.float32)
    rotated = triton_rope.norm_and_rotate(row, table, position)
    return triton_codecs.encode(codec, rotated, dim=dim, rope_dim=rope_dim)
