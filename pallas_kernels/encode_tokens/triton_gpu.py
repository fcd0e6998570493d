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

from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.norm_rope import NormRope
from pallas_kernels.encode_tokens import triton_token
from pallas_kernels.gpu import triton, triton_codecs, triton_heads

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

    def kernel(inputs: _Operands, outputs: _Outputs) -> None:
        token, part = pl.program_id(0), pl.program_id(1)  # part 0 is the entry
        position = inputs.positions[token]

        # The first program of a token has its entry, the others eight heads each.
        @pl.when(part == 0)
        def _encode() -> None:
            entry = triton_token.encode_entry(
                inputs.kv, inputs.norm, inputs.frequencies, token, position, codec=codec, eps=eps
            )
            triton_codecs.store_entry(outputs.planes, (token,), entry)

        def rotate() -> None:
            heads = triton_heads.Heads(inputs.queries, outputs.queries, token, part - 1)
            query_eps = norm_rope.query_eps
            triton_token.rotate_heads(heads, inputs.frequencies, position, eps=query_eps)

        if inputs.queries is not None:
            pl.when(part > 0)(rotate)

    # No two programs store the same row: the entry has one, and each eight heads one.
    encoded: _Outputs = triton.launch(
        kernel,
        grid=(num_tokens, 1 + num_head_tiles),
        inputs=_Operands(kv, norm_rope.weight, frequencies, positions, queries),
        outputs=_Outputs(
            planes=triton.word_shapes(shapes),
            queries=None if queries is None else jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        ),
        num_warps=_NUM_WARPS,
        name="encode_tokens",
    )
    return encoded.queries, triton.from_words(encoded.planes, shapes)


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs.

    Attributes:
      kv: [T, C].
      norm: [C].
      frequencies: f32[R / 2].
      positions: i32[T].
      queries: [T, H, C], or None.
    """

    kv: Any
    norm: Any
    frequencies: Any
    positions: Any
    queries: Any


class _Outputs(NamedTuple):
    """Arrays that the kernel writes, and in it their refs.

    Attributes:
      planes: [T, ...] each, byte planes as words.
      queries: [T, H, C], or None.
    """

    planes: Any
    queries: Any
