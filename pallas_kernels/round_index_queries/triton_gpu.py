"""Triton kernel of `round_index_queries`: a token and eight of its heads per program.

Rotation, butterflies, scales and codes of a head stay in registers; codes are never packed, since
what meets the keys takes values. Bytes: 6 * IH * IC a token of bf16, in and out. On an H200 (jax
0.11.2) 2.9 us for 64 tokens of 64 heads and 165 for 8,192, 57 % of the copy bandwidth; the
reference through XLA takes 22 and 1,338. By their count, 508 a thread, instructions bound it; that
is not profiled. It was 280 with 756 of them, when all butterflies went through reductions over
pairs. Sixteen heads a program take 147 and 3.6, four 177 and 2.8; bf16 rounded two at a time 162,
but queries of the attention 316 where they take 301. A decode step's queries go along in
`append_and_flush`.

It compiles for Blackwell and has not run there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import triton, triton_heads
from pallas_kernels.round_index_queries import triton_heads_rounding

Ref = Any
_NUM_WARPS = 4


def round_index_queries(
    queries: jax.Array, frequencies: jax.Array, positions: jax.Array, *, codec: Codec
) -> jax.Array:
    """See `op.round_index_queries`."""
    num_tokens, num_heads, _ = queries.shape

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        queries, frequencies, positions = inputs
        token, number = pl.program_id(0), pl.program_id(1)
        triton_heads_rounding.round_heads(
            queries, outputs[0], frequencies, token, number, positions[token], codec=codec
        )

    (rounded,) = triton.launch(
        kernel,
        grid=(num_tokens, triton_heads.num_head_tiles(num_heads)),
        inputs=[queries, frequencies, positions],
        outputs=[jax.ShapeDtypeStruct(queries.shape, jnp.float32)],
        num_warps=_NUM_WARPS,
        name="round_index_queries",
    )
    return rounded
