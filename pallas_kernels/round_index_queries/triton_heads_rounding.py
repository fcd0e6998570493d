"""What a program does with a few index heads of a token, inside a Triton kernel."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import triton_codecs, triton_heads, triton_rope

Ref = Any


def round_heads(
    heads: triton_heads.Heads, frequencies: Ref, position: jax.Array, *, codec: Codec
) -> None:
    """Rotates and rounds: from [T, IH, IC] to the same place of another such array."""
    dim, dtype = heads.source.shape[2], heads.source.dtype
    width = triton_codecs.tile_width(codec, dim)
    # Asked for before the heads, so that both are on their way together.
    table = triton_rope.load_rope_table(None, frequencies, dim=dim, width=width, dtype=dtype)
    triton_heads.map_heads(
        lambda x: triton_codecs.round_through(
            codec, triton_rope.rotate(x, table, position), dim=dim
        ),
        heads,
        width=width,
    )
