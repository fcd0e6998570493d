"""Triton kernel of sparse attention for many tokens: a program goes through tiles of keys in turn.

    a tile's rows, decoded to 16 bits; meanwhile addresses of entries of the tiles to come
    logits Q K^T, softmax so far; sums rescaled, then weights times keys added, in registers
    the next tile that is the program's

It serves entries in another layer than the window, and DeepSeek-V4.1's two formats, where the
Mosaic GPU kernels are told to leave them (`call_shapes.SERVES_ENTRIES_APART`). A program has up to
32 heads of a token and one split of its keys, every `splits`-th tile. Splits are added up by
`combine_triton`; a program that has all keys divides by the sum of weights itself.

Bytes: those of the keys, once for each 32 heads. It is compiled for Blackwell too, without a run.
Source: deepseek_v4.md section 1.3, step 9, and deepseek_v41.md section 6.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import rope_dim_of
from pallas_kernels.common.norm_rope import rotate
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.devices import current_device
from pallas_kernels.sparse_attention import combine_triton
from pallas_kernels.sparse_attention.call_shapes import FLOOR, LOG2_E, equal_cuts
from pallas_kernels.sparse_attention.launch import inverse_total
from pallas_kernels.sparse_attention.reference import Arguments, AttentionPart, JoinArguments
from pallas_kernels.sparse_attention.triton_keys import (
    KEYS,
    Found,
    Keys,
    Operands,
    codecs_of,
    count_tiles,
    find_blocks,
    load_found,
    load_selection,
    load_window,
    operands_of,
)

Ref = Any
_MOST_HEADS, _LEAST_HEADS = 32, 16
"""Of a program. Sums of 64 x 512 leave eight warps no registers for keys, nor sixteen warps."""
_NUM_WARPS = {16: 4, 32: 8}
"""Of a program, by its heads."""
_NUM_STAGES = 1
"""Loads follow addresses that are loaded, so that the compiler has no loop to pipeline."""


class _Softmax(NamedTuple):
    """Attention to the keys so far, relative to the largest logit.

    Attributes:
      largest: f32[heads], times log2(e).
      total: f32[heads], sum of weights.
      sums: f32[heads, width] for each operand of a key's columns.
    """

    largest: jax.Array
    total: jax.Array
    sums: tuple[jax.Array, ...]


class _Ahead(NamedTuple):
    """What a turn of entries begins with.

    Attributes:
      softmax: attention to the tiles before.
      found: where its own entries lie.
      entry: i32[KEYS], those of the next turn.
    """

    softmax: _Softmax
    found: Found
    entry: jax.Array


def sparse_attention(arguments: Arguments, *, splits: int | None = None) -> jax.Array:
    """See `op.sparse_attention`; queries are normed and rotated. `splits` is for tests."""
    positions, frequencies = arguments.call.positions, arguments.frequencies
    if splits is None:
        splits = choose_splits(arguments, num_sms=current_device().num_sms)
    if splits > 1:
        parts = AttentionPart(*_attend(arguments, splits))
        dtype = arguments.queries.dtype
        return combine_triton.combine(
            JoinArguments(parts, arguments.sink, positions, frequencies, dtype)
        )
    attended = _attend(arguments, splits).sums
    if frequencies is None:
        return attended
    # XLA's own: a pass over the rotated columns, and none over the sums in f32.
    return rotate(attended, positions[:, None], frequencies, inverse=True)


def choose_splits(arguments: Arguments, *, num_sms: int) -> int:
    """Programs that share a token's keys: as many as let all programs run at once."""
    num_tokens, num_heads, _ = arguments.queries.shape
    programs = num_tokens * pl.cdiv(num_heads, _heads_of_program(num_heads))
    return equal_cuts(sum(count_tiles(arguments)), num_sms // max(1, programs))[-1]


def _heads_of_program(num_heads: int) -> int:
    return min(_MOST_HEADS, max(_LEAST_HEADS, pl.next_power_of_2(num_heads)))


def _attend(arguments: Arguments, splits: int) -> _Outputs:
    """What each split gives, stacked; of one split the output, without statistics."""
    num_tokens, num_heads, dim = arguments.queries.shape
    window_tiles, entry_tiles = count_tiles(arguments)
    heads, codecs, divides = _heads_of_program(num_heads), codecs_of(arguments), splits == 1

    def kernel(refs: Operands, outputs: _Outputs) -> None:
        # Heads are the fastest axis: the programs that read the same keys start together.
        head_tile, split, token = (pl.program_id(axis) for axis in range(3))
        head = head_tile * heads + jnp.arange(heads, dtype=jnp.int32)
        runs = _runs_of(refs, dim)  # columns of latents, then those of RoPE
        # In shared memory before the first turn, for all of them; heads beyond the last are zeros.
        queries = [
            triton.load_where(
                refs.queries, (token, head[:, None], run.column()), run.live(head < num_heads)
            ).astype(codecs.dtype)
            for run in runs
        ]
        step = functools.partial(_add_tile, queries, scale=arguments.scale)

        def turns(end: jax.Array | int) -> jax.Array:
            """The split's turns up to a tile: it has tiles `split`, `split + splits`, ..."""
            return lax.div(jnp.maximum(end - split + splits - 1, 0), splits)

        def of_window(turn: jax.Array, state: _Softmax) -> _Softmax:
            tile = split + turn * splits
            return step(load_window(refs, token, tile, codecs, dim=dim), state)

        def select(turn: jax.Array) -> jax.Array:
            return load_selection(refs, token, split + turn * splits - window_tiles)

        def of_selected(turn: jax.Array, state: _Ahead) -> _Ahead:
            # Addresses are loads that depend on each other: those of tiles to come are on their
            # way while this one is multiplied.
            keys = load_found(refs, state.found, codecs, dim=dim)
            found = find_blocks(refs, token, state.entry)
            entry = select(turn + 2)
            return _Ahead(step(keys, state.softmax), found, entry)

        # f32[heads], f32[heads], and f32[heads, width] of each run: no key so far.
        state = _Softmax(
            jnp.full(heads, FLOOR, jnp.float32),
            jnp.zeros(heads, jnp.float32),
            tuple(jnp.zeros((heads, run.width), jnp.float32) for run in runs),
        )
        # Tiles of the window and of entries are numbered through; splits take them in turns.
        first_entry = turns(window_tiles)
        state = lax.fori_loop(0, first_entry, of_window, state)
        if entry_tiles:
            end = jnp.int32(entry_tiles)
            if refs.visible is not None:
                # Tiles beyond what a token sees have no entry.
                end = jnp.minimum(end, lax.div(refs.visible[token] + KEYS - 1, KEYS))
            end = turns(window_tiles + jnp.maximum(end, 0))
            found = find_blocks(refs, token, select(first_entry))
            ahead = _Ahead(state, found, select(first_entry + 1))
            state = lax.fori_loop(first_entry, end, of_selected, ahead).softmax
        lead = (token,) if divides else (split, token)
        _store(state, refs.sink, outputs, runs, lead, head, head < num_heads)

    shape = num_tokens, num_heads, dim
    if divides:
        outputs = _Outputs(jax.ShapeDtypeStruct(shape, arguments.queries.dtype))
    else:
        outputs = _Outputs(
            jax.ShapeDtypeStruct((splits, *shape), jnp.float32),
            jax.ShapeDtypeStruct((splits, num_tokens, 2, num_heads), jnp.float32),
        )
    return triton.launch(
        kernel,
        grid=(pl.cdiv(num_heads, heads), splits, num_tokens),
        inputs=operands_of(arguments, divides=divides),
        outputs=outputs,
        num_warps=_NUM_WARPS[heads],
        num_stages=_NUM_STAGES,
        name="sparse_attention_turns",
    )


class _Outputs(NamedTuple):
    """Arrays that the kernel writes, and in it their refs.

    Attributes:
      sums: f32[S, T, H, C] of splits, or of all keys the output, [T, H, C].
      statistics: f32[S, T, 2, H] of splits, as of `AttentionPart`; else None.
    """

    sums: Any
    statistics: Any = None


class _Run(NamedTuple):
    """Columns of a key that are one operand; static.

    Attributes:
      first: number of the first one.
      number: how many there are.
      width: of the operand, a power of two; what is beyond the columns is zeros.
    """

    first: int
    number: int
    width: int

    def column(self) -> jax.Array:
        """i32[1, width]."""
        return self.first + jnp.arange(self.width, dtype=jnp.int32)[None]

    def live(self, is_row: jax.Array) -> jax.Array:
        """bool[n, width]: the columns that there are, of the rows that there are."""
        lane = jnp.arange(self.width, dtype=jnp.int32)[None]
        return is_row[:, None] & (lane < self.number)


def _runs_of(refs: Operands, dim: int) -> list[_Run]:
    """The columns as `triton_entries.load_rows` gives them."""
    rope_dim = rope_dim_of(refs.ring)
    counts = [dim - rope_dim, rope_dim] if rope_dim else [dim]
    return [
        _Run(number * counts[0], count, pl.next_power_of_2(count))
        for number, count in enumerate(counts)
    ]


def _multiply(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Products of matrices over the last axis of x and that one of y, summed in f32."""
    over = ((1,), (axis,)), ((), ())
    return lax.dot_general(x, y, over, preferred_element_type=jnp.float32)


def _add_tile(queries: list[jax.Array], keys: Keys, state: _Softmax, *, scale: float) -> _Softmax:
    """Attention to the keys so far and to a tile more."""
    values = [columns.values for columns in keys.columns]
    products = [_multiply(x, y, 1) for x, y in zip(queries, values, strict=True)]  # [heads, KEYS]
    logits = functools.reduce(jnp.add, products)
    # A key that is not there has the logit minus infinity, and so the weight 0.
    logits = jnp.where(keys.is_key[None], logits * (scale * LOG2_E), -jnp.inf)
    largest = jnp.maximum(state.largest, jnp.max(logits, axis=1))  # f32[heads]
    weights = jnp.exp2(logits - largest[:, None])  # f32[heads, KEYS]
    # Sums so far are relative to the largest logit before.
    kept = jnp.exp2(state.largest - largest)
    sums = tuple(
        total * kept[:, None] + _multiply(weights.astype(some.dtype), some, 0)
        for total, some in zip(state.sums, values, strict=True)
    )
    return _Softmax(largest, state.total * kept + jnp.sum(weights, axis=1), sums)


def _store(
    state: _Softmax,
    sink: Ref | None,
    outputs: _Outputs,
    runs: list[_Run],
    lead: tuple[jax.Array, ...],
    head: jax.Array,
    is_head: jax.Array,
) -> None:
    """Stores sums and statistics of a split or, where there is a sink, what all keys give."""
    factor = None
    if sink is not None:
        # The last program of a token may have more heads than there are.
        own = triton.load_where(sink, (head,), is_head).astype(jnp.float32)
        factor = inverse_total(state.largest, state.total, own)
    else:
        for which, values in enumerate((state.largest, state.total)):
            place = (*lead, jnp.int32(which), head)
            triton.store_where(outputs.statistics, place, values, is_head)
    for sums, run in zip(state.sums, runs, strict=True):
        values = sums if factor is None else sums * factor[:, None]
        to = (*lead, head[:, None], run.column())  # [heads, width]
        triton.store_where(outputs.sums, to, values.astype(outputs.sums.dtype), run.live(is_head))
