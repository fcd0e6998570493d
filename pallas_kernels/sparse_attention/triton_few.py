"""Triton kernel of sparse attention for few tokens: sixteen heads and a tile of keys per program.

    addresses of the keys through ring or block table; their rows, decoded to 16 bits
    logits Q K^T, softmax of the tile          -> statistics
    weights times keys                         -> sums

Each tile is a split; `combine_triton` adds them up. With few tokens a call takes as long as the way
from a position to its output: here each program goes it once, and has little to do on it.

Bytes: those of the keys, once for each sixteen heads, out of L2; the sums. Latency bounds it.
Products are of f16 or bf16, with f32 sums. It compiles for Blackwell and has not run there.
Measurements and roads not taken: docs/kernels/sparse_attention.md.
Source: deepseek_v4.md section 1.3, step 9.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.sparse_attention import combine_triton
from pallas_kernels.sparse_attention.call_shapes import FLOOR, LOG2_E
from pallas_kernels.sparse_attention.reference import Arguments, AttentionPart, JoinArguments
from pallas_kernels.sparse_attention.triton_keys import (
    KEYS,
    Keys,
    Operands,
    codecs_of,
    count_tiles,
    load_selected,
    load_window,
    operands_of,
)

Ref = Any
HEADS = 16
"""Of a program; the fewest that tensor cores take."""
_NUM_WARPS = 4
_MOST_PROGRAMS_OF_SM = 1.25
"""Up to which this kernel is faster than Mosaic's, whose CTAs have tiles in turn."""


def is_fastest(arguments: Arguments, *, num_sms: int) -> bool:
    """Whether a call is small enough that this kernel takes less time than the others."""
    num_tokens, num_heads, _ = arguments.queries.shape
    programs = num_tokens * pl.cdiv(num_heads, HEADS) * sum(count_tiles(arguments))
    return arguments.query_eps is None and programs <= _MOST_PROGRAMS_OF_SM * num_sms


def sparse_attention(arguments: Arguments) -> jax.Array:
    """See `op.sparse_attention`; queries are normed and rotated."""
    parts = _attend(arguments)
    positions, frequencies = arguments.call.positions, arguments.frequencies
    return combine_triton.combine(
        JoinArguments(parts, arguments.sink, positions, frequencies, arguments.queries.dtype)
    )


def _attend(arguments: Arguments) -> AttentionPart:
    """What each tile of keys gives, stacked."""
    num_tokens, num_heads, dim = arguments.queries.shape
    window_tiles, entry_tiles = count_tiles(arguments)
    num_tiles, codecs = window_tiles + entry_tiles, codecs_of(arguments)

    def kernel(refs: Operands, outputs: tuple[Ref, Ref]) -> None:
        # Heads are the fastest axis: the programs that read the same keys start together.
        head_tile, tile, token = (pl.program_id(axis) for axis in range(3))
        of_window = functools.partial(load_window, refs, token, tile, codecs, dim=dim)
        if entry_tiles:
            number = tile - window_tiles
            of_selected = functools.partial(load_selected, refs, token, number, codecs, dim=dim)
            # Tiles of the window come first; a program has one tile, of one kind.
            keys = lax.cond(tile < window_tiles, of_window, of_selected)
        else:
            keys = of_window()
        program = tile, token, head_tile
        part = AttentionPart(*outputs)
        _attend_to(keys, refs.queries, part, program, scale=arguments.scale, dtype=codecs.dtype)

    sums, statistics = triton.launch(
        kernel,
        grid=(pl.cdiv(num_heads, HEADS), num_tiles, num_tokens),
        inputs=operands_of(arguments),
        outputs=(
            jax.ShapeDtypeStruct((num_tiles, num_tokens, num_heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((num_tiles, num_tokens, 2, num_heads), jnp.float32),
        ),
        num_warps=_NUM_WARPS,
        name="sparse_attention_few",
    )
    return AttentionPart(sums, statistics)


def _attend_to(
    keys: Keys,
    queries: Ref,
    outputs: AttentionPart,
    program: tuple[jax.Array, jax.Array, jax.Array],
    *,
    scale: float,
    dtype: Any,
) -> None:
    """Stores what one tile of keys gives sixteen heads of a token."""
    tile, token, head_tile = program
    # Heads beyond the last have queries of zeros, and are not stored.
    head = head_tile * HEADS + jnp.arange(HEADS, dtype=jnp.int32)
    is_head = head < queries.shape[1]

    def multiply(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
        over = ((1,), (axis,)), ((), ())
        return lax.dot_general(x, y, over, preferred_element_type=jnp.float32)

    # A key's columns come as operands whose widths are powers of two; their products add up.
    logits = jnp.zeros((HEADS, KEYS), jnp.float32)
    for columns in keys.columns:
        column, is_one = columns.places()
        at = token, head[:, None], column
        some = triton.load_where(queries, at, is_head[:, None] & is_one)  # [16, width]
        logits = logits + multiply(some.astype(dtype), columns.values, 1)
    # A key that is not there has the logit minus infinity, and so the weight 0.
    logits = jnp.where(keys.is_key[None], logits * (scale * LOG2_E), -jnp.inf)  # a NaN query too
    # A tile without keys has the maximum `FLOOR` and the sum 0, and adds nothing.
    largest = jnp.maximum(jnp.max(logits, axis=1), FLOOR)
    weights = jnp.exp2(logits - largest[:, None])  # f32[16, KEYS]
    for which, values in enumerate((largest, jnp.sum(weights, axis=1))):
        triton.store_where(
            outputs.statistics, (tile, token, jnp.int32(which), head), values, is_head
        )
    # Weights go from the layout of a product to that of an operand.
    for columns in keys.columns:
        column, is_one = columns.places()
        # Over the keys: f32[16, width], the columns of this operand.
        some = multiply(weights.astype(dtype), columns.values, 0)
        triton.store_where(
            outputs.sums, (tile, token, head[:, None], column), some, is_head[:, None] & is_one
        )
