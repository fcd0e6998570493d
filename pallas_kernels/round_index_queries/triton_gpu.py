"""Triton kernel of `round_index_queries`: a token and eight of its heads per program.

RoPE, the butterflies of the Hadamard rotation, scales and codes of a head stay in registers. Codes
are never packed, since what meets the keys takes values. A decode step's queries go along in
`append_and_flush`.

Bytes: 4 * IH * IC a token, bf16 in and out. By their count, some 500 a thread, instructions bound
it; that is not profiled.

Limits: a codec with a Hadamard rotation needs IC to be a power of two. It compiles for Blackwell
and has not run there. Figures and roads not taken: docs/kernels/round_index_queries.md.
"""

from __future__ import annotations

from typing import Any

import jax
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

    def kernel(inputs: list[Ref], rounded_ref: Ref) -> None:
        queries, frequencies, positions = inputs
        token, number = pl.program_id(0), pl.program_id(1)
        heads = triton_heads.Heads(queries, rounded_ref, token, number)
        triton_heads_rounding.round_heads(heads, frequencies, positions[token], codec=codec)

    return triton.launch(
        kernel,
        grid=(num_tokens, triton_heads.num_head_tiles(num_heads)),
        inputs=[queries, frequencies, positions],
        outputs=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        num_warps=_NUM_WARPS,
        name="round_index_queries",
    )
