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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.checks import first_plane
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_entries import Columns, Source, find_entries, load_rows
from pallas_kernels.sparse_attention import combine_triton
from pallas_kernels.sparse_attention.call_shapes import FLOOR, LOG2_E, product_dtype
from pallas_kernels.sparse_attention.reference import Arguments, AttentionPart, JoinArguments

Ref = Any
HEADS = 16
"""Of a program; the fewest that tensor cores take."""
KEYS = 32
_NUM_WARPS = 4
_MOST_PROGRAMS_OF_SM = 1.25
"""Up to which this kernel is faster than Mosaic's, whose CTAs have tiles in turn."""


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs; see `op.sparse_attention`.

    Attributes:
      queries: [T, H, C].
      layer: i32[1].
      slots, positions, lengths, segment_ids: i32[T].
      visible: i32[T], or None.
      selected: i32[T, K], or None for the window alone.
      table: i32[B, LB].
      ring, rows, pool: planes, byte planes as words; the last None for the window alone.
    """

    queries: Any
    layer: Any
    slots: Any
    positions: Any
    lengths: Any
    segment_ids: Any
    visible: Any
    selected: Any
    table: Any
    ring: Any
    rows: Any
    pool: Any


def is_fastest(arguments: Arguments, *, num_sms: int) -> bool:
    """Whether a call is small enough that this kernel takes less time than the others."""
    num_tokens, num_heads, _ = arguments.queries.shape
    programs = num_tokens * pl.cdiv(num_heads, HEADS) * sum(_tiles(arguments))
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
    ring, pool, call = arguments.ring, arguments.pool, arguments.call
    num_tokens, num_heads, dim = arguments.queries.shape
    window_tiles, entry_tiles = _tiles(arguments)
    num_tiles, dtype = window_tiles + entry_tiles, product_dtype(ring.codec)
    operands = _Operands(
        queries=arguments.queries,
        layer=ring.layer[None],
        slots=call.slots,
        positions=call.positions,
        lengths=call.lengths,
        segment_ids=call.segment_ids,
        visible=call.visible if entry_tiles else None,
        selected=arguments.selected if entry_tiles else None,
        table=call.block_table,
        ring=triton.as_words(ring.planes),
        rows=triton.as_words(arguments.rows),
        pool=triton.as_words(pool.planes) if pool is not None and entry_tiles else None,
    )

    def kernel(refs: _Operands, outputs: tuple[Ref, Ref]) -> None:
        # Heads are the fastest axis: the programs that read the same keys start together.
        head_tile, tile, token = (pl.program_id(axis) for axis in range(3))

        def load(find: Callable[..., list[Source]], tile: jax.Array) -> _Keys:
            place = tile * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
            # Addresses first, loads that depend on each other; then all columns at once.
            sources = find(refs, token, place)
            # Of several sources a key is in one at most.
            is_key = functools.reduce(jnp.logical_or, (source.present for source in sources))
            return _Keys(load_rows(sources, ring.codec, dim=dim, dtype=dtype), is_key)

        of_window = functools.partial(load, _find_window, tile)
        if entry_tiles:
            of_selected = functools.partial(load, _find_selected, tile - window_tiles)
            # Tiles of the window come first; a program has one tile, of one kind.
            keys = lax.cond(tile < window_tiles, of_window, of_selected)
        else:
            keys = of_window()
        program = tile, token, head_tile
        part = AttentionPart(*outputs)
        _attend_to(keys, refs.queries, part, program, scale=arguments.scale, dtype=dtype)

    sums, statistics = triton.launch(
        kernel,
        grid=(pl.cdiv(num_heads, HEADS), num_tiles, num_tokens),
        inputs=operands,
        outputs=(
            jax.ShapeDtypeStruct((num_tiles, num_tokens, num_heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((num_tiles, num_tokens, 2, num_heads), jnp.float32),
        ),
        num_warps=_NUM_WARPS,
        name="sparse_attention_few",
    )
    return AttentionPart(sums, statistics)


def _tiles(arguments: Arguments) -> tuple[int, int]:
    """Tiles of a token's window, and of the places of its entries."""
    window = first_plane(arguments.ring.planes).shape[2]
    selected = arguments.selected
    return pl.cdiv(window, KEYS), 0 if selected is None else pl.cdiv(selected.shape[1], KEYS)


class _Keys(NamedTuple):
    """A tile of keys.

    Attributes:
      columns: [KEYS, ...] each, all of a key's.
      is_key: bool[KEYS], whether there is one.
    """

    columns: list[Columns]
    is_key: jax.Array


def _find_window(refs: _Operands, token: jax.Array, place: jax.Array) -> list[Source]:
    """Where keys of a token's window lie, the oldest first: in the ring, or among the call's."""
    window = first_plane(refs.ring).shape[2]
    slot, newest = refs.slots[token], refs.positions[token]
    position = newest - (window - 1) + place
    is_key = (place < window) & (position >= 0) & (slot >= 0)
    in_call = position >= refs.lengths[token]
    # Rows of a ring are congruent to positions.
    row = lax.rem(jnp.maximum(position, 0), window)
    return [
        Source(refs.ring, (refs.layer[0], jnp.maximum(slot, 0), row), is_key & ~in_call),
        Source(refs.rows, (jnp.maximum(token - (newest - position), 0),), is_key & in_call),
    ]


def _find_selected(refs: _Operands, token: jax.Array, place: jax.Array) -> list[Source]:
    """Where entries at some places of a token's selection lie."""
    # Beyond the selection, or what a token sees of it, there is no key, and nothing is loaded.
    wanted = place < refs.selected.shape[1]
    if refs.visible is not None:
        wanted &= place < refs.visible[token]
    entry = triton.load_where(refs.selected, (token, place), wanted, -1)
    block, row, is_key = find_entries(
        entry,
        refs.table,
        refs.segment_ids[token],
        entries_per_block=first_plane(refs.pool).shape[2],
    )
    return [Source(refs.pool, (refs.layer[0], block, row), is_key)]


def _attend_to(
    keys: _Keys,
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
        some = triton.load_where(queries, at, is_head[:, None] & is_one)
        logits = logits + multiply(some.astype(dtype), columns.values, 1)
    # A key that is not there has the logit minus infinity, and so the weight 0.
    logits = jnp.where(keys.is_key[None], logits * (scale * LOG2_E), -jnp.inf)  # a NaN query too
    # A tile without keys has the maximum `FLOOR` and the sum 0, and adds nothing.
    largest = jnp.maximum(jnp.max(logits, axis=1), FLOOR)
    weights = jnp.exp2(logits - largest[:, None])
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
