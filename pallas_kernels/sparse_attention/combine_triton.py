"""Triton kernel that adds up the splits of sparse attention: a token's head per CTA.

A split's sums are relative to its own largest logit. With m the largest of all, and of the sink,

    out = sum over splits of sums 2^(largest - m) / (sum of total 2^(largest - m) + 2^(sink - m))

which is rounded, and inverse RoPE follows, by the query's position, if frequencies are given.

One CTA takes one head of one token. Bytes: the sums, which are in the L2 cache, and the output.
Latency bounds it: every warp has all its loads on their way at once. It compiles for Blackwell and
has not run there. Measurements and roads not taken: docs/kernels/sparse_attention.md.

Source: deepseek_v4.md sections 1.3, step 9, and 1.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton, triton_rope
from pallas_kernels.sparse_attention.call_shapes import FLOOR, LOG2_E
from pallas_kernels.sparse_attention.reference import JoinArguments

Ref = Any
_MOST_ROWS = 64
"""Splits that a CTA has in its registers at once."""
_ROWS_OF_WARPS = 8
"""Splits that four warps have; more take more warps."""
_MOST_WARPS = 16


def combine(arguments: JoinArguments) -> jax.Array:
    """See `parts.join_parts`; a part is a split's, and may have more heads than there are."""
    dtype = arguments.dtype
    splits, num_tokens, _, dim = arguments.parts.sums.shape
    num_heads = arguments.sink.shape[0]
    width, all_splits = pl.next_power_of_2(dim), pl.next_power_of_2(splits)
    rows = min(all_splits, _MOST_ROWS)

    def kernel(inputs: _Operands, out_ref: Ref) -> None:
        token, head = pl.program_id(0), pl.program_id(1)
        position = inputs.positions[token]
        column = jnp.arange(width, dtype=jnp.int32)
        table = None
        if inputs.frequencies is not None:
            table = triton_rope.load_rope_table(
                None, inputs.frequencies, dim=dim, width=width, dtype=dtype
            )

        def load_statistic(which: int, first: int, count: int) -> jax.Array:
            split = first + jnp.arange(count, dtype=jnp.int32)
            at = (split, token, jnp.int32(which), head)
            absent = [FLOOR, 0.0][which]
            return triton.load_where(inputs.parts.statistics, at, split < splits, absent)

        def load_sums(first: int) -> jax.Array:
            split = first + jnp.arange(rows, dtype=jnp.int32)
            # Rows and columns are powers of two: what is beyond is zeros, and adds nothing.
            inside = (split[:, None] < splits) & (column[None] < dim)
            at = (split[:, None], token, head, column[None])
            return triton.load_where(inputs.parts.sums, at, inside)

        # The sums, most of what is read, are asked for before statistics are waited for.
        parts = {first: load_sums(first) for first in range(0, splits, rows)}  # f32[rows, width]
        largest, total = (load_statistic(which, 0, all_splits) for which in range(2))
        own_sink = inputs.sink[head] * LOG2_E
        # All logits are times log2(e) here; the sink is a logit that no key has.
        top = jnp.maximum(jnp.max(largest), jnp.maximum(own_sink, FLOOR))
        whole = jnp.sum(total * jnp.exp2(largest - top)) + jnp.exp2(own_sink - top)
        out = jnp.zeros(width, jnp.float32)
        for first, some in parts.items():
            # Loaded once more for these rows: Triton cuts no run out of what is in registers.
            weight = jnp.exp2(load_statistic(0, first, rows) - top)
            weight = jnp.broadcast_to(weight[:, None], some.shape)
            # A sum too large for f32 is that of a split which counts for nothing.
            out = out + jnp.sum(jnp.where(weight == 0, 0.0, some * weight), axis=0)
        # Divided once, rounded, then rotated and rounded again, as the definition is.
        out = triton_rope.round_to_dtype(out * jnp.where(whole == 0, 0.0, 1 / whole), dtype)
        if table is not None:
            out = triton_rope.rotate(out, table, -position)
        triton.store_row(out_ref, (token, head), out.astype(dtype), first=0, count=dim)

    return triton.launch(
        kernel,
        grid=(num_tokens, num_heads),
        inputs=_Operands(
            arguments.parts, arguments.sink, arguments.positions, arguments.frequencies
        ),
        outputs=jax.ShapeDtypeStruct((num_tokens, num_heads, dim), dtype),
        num_warps=min(_MOST_WARPS, 4 * max(1, rows // _ROWS_OF_WARPS)),
        name="combine_splits",
    )


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs.

    Attributes:
      parts: of S splits, sums f32[S, T, H, C] and statistics f32[S, T, 2, H].
      sink: f32[H].
      positions: i32[T].
      frequencies: f32[R / 2], or None.
    """

    parts: Any
    sink: Any
    positions: Any
    frequencies: Any
