"""Triton kernel of `encode_tokens`: a window entry or eight query heads per program.

Program (t, i), i > 0, loads eight query heads of token t, applies norm and RoPE in registers and
stores them. Program (t, 0) does the same with the window entry, with a norm weight, and encodes it.
No program waits for another, and the bits of a vector depend on that vector alone.

Bytes: 4 * H * C a token of bf16 queries, in and out, beside which the entry is nothing. Memory
bounds it: 8192 tokens of 64 heads take 85 % of an H200's copy bandwidth.

Limits: a codec without a form for a tile raises `NotImplementedError`. It compiles for Blackwell
and has not run there. Figures and roads not taken: docs/kernels/encode_tokens.md.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.norm_rope import NormRope
from pallas_kernels.encode_tokens import triton_token
from pallas_kernels.gpu import triton, triton_codecs, triton_heads

Ref = Any
_NUM_WARPS = 4


def encode_tokens(
    queries: jax.Array | None,
    kv: jax.Array,
    norm_rope: NormRope,
    positions: jax.Array,
    *,
    codec: Codec,
) -> tuple[jax.Array | None, Planes]:
    """See `op.encode_tokens`: a token per program, for its entry and for eight of its heads."""
    num_tokens = kv.shape[0]
    num_head_tiles = 0 if queries is None else triton_heads.num_head_tiles(queries.shape[1])
    frequencies, eps = norm_rope.frequencies, norm_rope.eps
    shapes = {
        name: jax.ShapeDtypeStruct((num_tokens, *shape.shape), shape.dtype)
        for name, shape in codec.plane_shapes(kv.shape[1], 2 * frequencies.shape[0]).items()
    }

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        kv, norm, frequencies, positions, *heads_in = inputs
        planes, heads_out = outputs[: len(shapes)], outputs[len(shapes) :]
        token, part = pl.program_id(0), pl.program_id(1)
        position = positions[token]

        @pl.when(part == 0)
        def _encode() -> None:
            entry = triton_token.encode_entry(
                kv, norm, frequencies, token, position, codec=codec, eps=eps
            )
            triton_codecs.store_entry(dict(zip(shapes, planes, strict=True)), (token,), entry)

        def rotate() -> None:
            heads = triton_heads.Heads(heads_in[0], heads_out[0], token, part - 1)
            triton_token.rotate_heads(heads, frequencies, position, eps=eps)

        if heads_in:
            pl.when(part > 0)(rotate)

    given = [] if queries is None else [queries]
    found = triton.launch(
        kernel,
        grid=(num_tokens, 1 + num_head_tiles),
        inputs=[kv, norm_rope.weight, frequencies, positions, *given],
        outputs=[
            *triton.word_shapes(shapes).values(),
            *(jax.ShapeDtypeStruct(heads.shape, heads.dtype) for heads in given),
        ],
        num_warps=_NUM_WARPS,
        name="encode_tokens",
    )
    planes = triton.from_words(dict(zip(shapes, found, strict=False)), shapes)
    return (found[-1] if given else None), planes
