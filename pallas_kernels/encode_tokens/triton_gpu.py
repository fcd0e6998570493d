"""Triton kernels of `encode_tokens` and, rings and running pool in one launch, `append_tokens`.

`encode_tokens` reads and writes a token's queries once, 2 * H * C numbers beside which its entry is
nothing: memory bounds it.

In `append_tokens` program (b, i) takes the i-th token from the end of row b and copies its rows to
the rings that keep it; more programs a row fold the tokens of its open window into tiles of the
running pool. Of several tokens that share a ring row only the last one has a program, so no order
matters. A program without a token ends after two loads; there are B * min(max_count, W) of them.
Bytes: the rows that are kept, in and out. What bounds it is the launch and two dependent loads.

H200, microseconds of the kernel alone (fp8_ue8m0): CSA 2.3 for one request and for the 8192 tokens
of a prefill, 2.8 for 64 requests; HCA 1.7 for 64 requests, 4.0 for a prefill that leaves 126 tokens
open. `encode_tokens` of 64 heads takes 4.2 us for 64 tokens and 301 for 8192, 85 % of the copy
bandwidth; 413 where heads were read by masked indices, two bytes a load. Both compile for Blackwell
and have not run there.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.encode_tokens import triton_token
from pallas_kernels.gpu import triton, triton_codecs, triton_heads

Ref = Any
_NUM_WARPS = 4


def encode_tokens(
    queries: jax.Array,
    kv: jax.Array,
    norm: jax.Array,
    frequencies: jax.Array,
    positions: jax.Array,
    *,
    codec: Codec,
    eps: float,
) -> tuple[jax.Array, Planes]:
    """See `op.encode_tokens`: a token per program, for its entry and for eight of its heads."""
    num_tokens, num_heads, _ = queries.shape
    shapes = {
        name: jax.ShapeDtypeStruct((num_tokens, *shape.shape), shape.dtype)
        for name, shape in codec.plane_shapes(kv.shape[1], 2 * frequencies.shape[0]).items()
    }

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        queries, kv, norm, frequencies, positions = inputs
        rotated, *planes = outputs
        token, part = pl.program_id(0), pl.program_id(1)
        position = positions[token]

        @pl.when(part == 0)
        def _encode() -> None:
            entry = triton_token.encode_entry(
                kv, norm, frequencies, token, position, codec=codec, eps=eps
            )
            triton_codecs.store_entry(dict(zip(shapes, planes, strict=True)), (token,), entry)

        @pl.when(part > 0)
        def _rotate() -> None:
            triton_token.rotate_heads(
                queries, rotated, frequencies, token, part - 1, position, eps=eps
            )

    rotated, *planes = triton.launch(
        kernel,
        grid=(num_tokens, 1 + triton_heads.num_head_tiles(num_heads)),
        inputs=[queries, kv, norm, frequencies, positions],
        outputs=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            *triton.word_shapes(shapes).values(),
        ],
        num_warps=_NUM_WARPS,
        name="encode_tokens",
    )
    return rotated, triton.from_words(dict(zip(shapes, planes, strict=True)), shapes)
