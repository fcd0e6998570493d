"""Triton kernel of `append_and_flush`: all of a decode step's small work of a layer, one launch.

Programs (t, i) of token t: one for each compressor, which stores the token's projections and, where
they close a window, pools, norms, rotates, encodes and stores its entry; one for the window entry;
one for every eight heads of the queries; and one for every eight of the index queries, where there
are any. None waits for another: a closing window pools older rows of the state and the token's own
row from the call, and the one row that is written here is read by nobody.

Bytes: queries in and out, 4 * H * C, and index queries, 6 * IH * IC, beside which the rest is a few
KiB a token, and as many again as the 2M pooled rows where a CSA window closes. At few requests a
chain of loads, exponentials and reductions bounds it; at many memory does, by the queries.

Limits: one token per segment, and no slot twice. It compiles for Blackwell and has not run there.
Figures and roads not taken: docs/kernels/append_and_flush.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.append_and_flush.reference import Appended, Arguments
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Codec
from pallas_kernels.compressor import triton_pool
from pallas_kernels.compressor.triton_closing import Closing, prepare_store
from pallas_kernels.encode_tokens import triton_token
from pallas_kernels.gpu import triton, triton_codecs, triton_heads
from pallas_kernels.round_index_queries import triton_heads_rounding

Ref = Any
_NUM_WARPS = 4


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs; see `op.append_and_flush`.

    Attributes:
      layer: i32[1].
      segment_ids, slots, positions: i32[T].
      table: i32[B, LB]; None without compressors.
      queries: [T, H, C].
      kv: [T, C].
      norm: [C].
      frequencies: f32[R / 2].
      projected: of each compressor.
      index_queries: [T, IH, IC], or None.
    """

    layer: Any
    segment_ids: Any
    slots: Any
    positions: Any
    table: Any
    queries: Any
    kv: Any
    norm: Any
    frequencies: Any
    projected: Sequence[_Projected]
    index_queries: Any


class _Projected(NamedTuple):
    """What the call has for one compressor: values and scores f32[T, n], and the norm's weight."""

    rows: Any
    norm: Any


class _Kept(NamedTuple):
    """Arrays that the kernel updates, and in it their refs, byte planes of entries as words.

    Attributes:
      ring: planes [L, NS, W, ...].
      states: of each compressor: values and scores of CSA, the running pool of HCA.
      pools: of each compressor: planes [L, NB, EB, ...].
    """

    ring: Any
    states: Any
    pools: Any


class _Outputs(NamedTuple):
    """Arrays that the kernel makes, and in it their refs; see `Appended`."""

    queries: Any
    rows: Any
    index_queries: Any


class _Programs(NamedTuple):
    """Which programs of a token do what, by their numbers; those of the compressors are the first.

    Attributes:
      window: the one that has the window entry.
      heads: first of those that have eight heads of the queries each.
      index_heads: first of those that have eight of the index queries' each.
      total: programs of a token.
    """

    window: int
    heads: int
    index_heads: int
    total: int

    @classmethod
    def of(cls, arguments: Arguments) -> _Programs:
        """Those of a call."""
        window, heads = len(arguments.compressors), len(arguments.compressors) + 1
        index_heads = heads + triton_heads.num_head_tiles(arguments.queries.shape[1])
        total = index_heads
        if arguments.index_queries is not None:
            total += triton_heads.num_head_tiles(arguments.index_queries.shape[1])
        return cls(window, heads, index_heads, total)


def append_and_flush(arguments: Arguments) -> Appended:
    """See `op.append_and_flush`."""
    compressors, window = arguments.compressors, arguments.ring.planes
    queries, index_queries = arguments.queries, arguments.index_queries
    num_tokens, programs = queries.shape[0], _Programs.of(arguments)
    shapes = {
        name: jax.ShapeDtypeStruct((num_tokens, *plane.shape[3:]), plane.dtype)
        for name, plane in window.items()
    }
    kept: _Kept
    made: _Outputs
    kept, made = triton.launch(
        functools.partial(_run_program, arguments=arguments, programs=programs),
        grid=(num_tokens, programs.total),
        inputs=_operands(arguments),
        in_place=_Kept(
            ring=triton.as_words(window),
            states=[compressor.state for compressor in compressors],
            pools=[triton.as_words(compressor.pool) for compressor in compressors],
        ),
        outputs=_Outputs(
            queries=_shape_of(queries),
            rows=triton.word_shapes(shapes),
            index_queries=None if index_queries is None else _shape_of(index_queries),
        ),
        num_warps=_NUM_WARPS,
        name="append_and_flush",
    )
    return Appended(
        queries=made.queries,
        rows=triton.from_words(made.rows, shapes),
        ring=triton.from_words(kept.ring, window),
        states=tuple(kept.states),
        pools=tuple(
            triton.from_words(words, compressor.pool)
            for words, compressor in zip(kept.pools, compressors, strict=True)
        ),
        index_queries=made.index_queries,
    )


def _operands(arguments: Arguments) -> _Operands:
    """The arrays as the kernel reads them."""
    call, compressors, norm_rope = arguments.call, arguments.compressors, arguments.norm_rope
    return _Operands(
        layer=arguments.ring.layer.reshape(1),
        segment_ids=call.segment_ids,
        slots=call.slots,
        positions=call.positions,
        table=call.block_table if compressors else None,
        queries=arguments.queries,
        kv=arguments.kv,
        norm=norm_rope.weight,
        frequencies=norm_rope.frequencies,
        projected=[_Projected(compressor.rows, compressor.norm) for compressor in compressors],
        index_queries=arguments.index_queries,
    )


def _run_program(
    inputs: _Operands, kept: _Kept, outputs: _Outputs, *, arguments: Arguments, programs: _Programs
) -> None:
    """One program of a token; each has the code of all, and takes its own by its number."""
    token, program = pl.program_id(0), pl.program_id(1)
    # What every program of a token needs to know of it.
    closes = _read_token(inputs, token, arguments.compression_ratio)
    live = inputs.slots[token] >= 0
    for number, compressor in enumerate(arguments.compressors):
        append = functools.partial(
            _append_csa if isinstance(compressor.state, dict) else _append_hca,
            inputs.projected[number],
            kept.states[number],
            kept.pools[number],
            inputs.frequencies,
            closes,
            codec=compressor.codec,
            eps=arguments.norm_rope.eps,
        )
        # Padding has no slot, and so no state or pool that it could change.
        pl.when((program == number) & live)(append)
    pl.when(program == programs.window)(
        functools.partial(_append_window, inputs, kept, outputs, closes, live, arguments=arguments)
    )
    # The rest are programs of heads: of queries, then of index queries.
    has_heads = program >= programs.heads
    if arguments.index_codec is not None:
        has_heads &= program < programs.index_heads

    @pl.when(has_heads)
    def _rotate_heads() -> None:
        heads = triton_heads.Heads(inputs.queries, outputs.queries, token, program - programs.heads)
        eps = arguments.norm_rope.query_eps
        triton_token.rotate_heads(heads, inputs.frequencies, closes.position, eps=eps)

    if arguments.index_codec is not None:
        round_heads = functools.partial(
            triton_heads_rounding.round_heads,
            triton_heads.Heads(
                inputs.index_queries, outputs.index_queries, token, program - programs.index_heads
            ),
            inputs.frequencies,
            closes.position,
            codec=arguments.index_codec,
        )
        pl.when(program >= programs.index_heads)(round_heads)


def _append_window(
    inputs: _Operands,
    kept: _Kept,
    outputs: _Outputs,
    closes: Closing,
    live: jax.Array,
    *,
    arguments: Arguments,
) -> None:
    """Encodes the token's window entry, for this call and for later ones."""
    window_size = first_plane(arguments.ring.planes).shape[2]  # W
    entry = triton_token.encode_entry(
        inputs.kv,
        inputs.norm,
        inputs.frequencies,
        closes.token,
        closes.position,
        codec=arguments.ring.codec,
        eps=arguments.norm_rope.eps,
    )
    # For this call, which reads it there; and, unless it is padding, for later ones.
    triton_codecs.store_entry(outputs.rows, (closes.token,), entry)
    # The ring row belongs to a token that no query sees any more.
    at = (closes.layer, closes.slot, closes.position % window_size)
    pl.when(live)(functools.partial(triton_codecs.store_entry, kept.ring, at, entry))


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _read_token(inputs: _Operands, token: jax.Array, compression_ratio: int) -> Closing:
    """The program's token; whether it closes a window, its position says."""
    # Padding reads slot 0, whose state it then leaves alone.
    position, slot = inputs.positions[token], jnp.maximum(inputs.slots[token], 0)
    return Closing(
        layer=inputs.layer[0],
        token=token,
        segment=inputs.segment_ids[token],
        slot=slot,
        position=position,
        # One token a segment: all tokens before it came before the call.
        length=position,
        compression_ratio=compression_ratio,
        table=inputs.table,
    )


def _append_csa(
    projected: _Projected,
    state: Mapping[str, Ref],
    planes: dict[str, Ref],
    frequencies: Ref,
    closes: Closing,
    *,
    codec: Codec,
    eps: float,
) -> None:
    """Keeps the token's values and scores; a closing window pools 2M - 1 kept rows and them."""
    norm = projected.norm
    channels, period = norm.shape[0], 2 * closes.compression_ratio
    width = triton_codecs.tile_width(codec, channels)

    @pl.when((closes.position + 1) % closes.compression_ratio == 0)
    def _flush() -> None:
        # The oldest first: M tokens of the window before, whose b-stream is in the first columns,
        # then M of the own one.
        tokens = []
        for back in range(period - 1, -1, -1):  # tokens before this one
            state_row = jnp.maximum(closes.position - back, 0) % period
            # The token's own row comes from the call: in the state it is being written meanwhile.
            rows, row = state, (closes.layer, closes.slot, state_row)
            if not back:
                rows, row = projected.rows, (closes.token,)
            start = 0 if back >= closes.compression_ratio else channels
            tokens.append(
                [
                    triton.load_row(rows[name], row, start=start, count=channels, width=width)
                    for name in triton_pool.TOKEN
                ]
            )
        # Weights and the entry's address are loaded before the pooling, which waits for all tokens.
        store = prepare_store(planes, codec, norm, frequencies, width=width, eps=eps)
        place = closes.locate(planes)
        pooled = triton_pool.pool_overlapping(tokens, closes.position >= closes.compression_ratio)
        store(triton_pool.mean(pooled, channels, norm.dtype), closes.begin, place)

    # Nobody reads this row in this launch: a window that closes has the token from the call.
    for name in triton_pool.TOKEN:
        at = (closes.layer, closes.slot, closes.position % period)
        triton.copy_row(projected.rows[name], (closes.token,), state[name], at)


def _append_hca(
    projected: _Projected,
    running: Ref,
    planes: dict[str, Ref],
    frequencies: Ref,
    closes: Closing,
    *,
    codec: Codec,
    eps: float,
) -> None:
    """Folds the token into the running pool; where that closes the window, empties it."""
    norm = projected.norm
    channels = norm.shape[0]
    width = triton_codecs.tile_width(codec, channels)
    # One program has all of the pool's channels, so that nobody else reads or writes it meanwhile.
    at, lanes = (closes.layer, closes.slot), {"start": 0, "count": channels, "width": width}
    ends = (closes.position + 1) % closes.compression_ratio == 0
    # f32[width] each: the running pool, empty at a window's first token, and the token's own.
    pooled = triton_pool.fold(
        triton_pool.continue_pool(
            running, at, closes.position % closes.compression_ratio > 0, **lanes
        ),
        *(
            triton.load_row(projected.rows[name], (closes.token,), **lanes)
            for name in triton_pool.TOKEN
        ),
    )
    # The window after it starts with nothing.
    left = triton_pool.select_pool(ends, triton_pool.empty_pool(width), pooled)
    for number, value in enumerate(left):
        triton.store_row(running, (*at, number), value, first=0, count=channels)

    @pl.when(ends)
    def _flush() -> None:
        store = prepare_store(planes, codec, norm, frequencies, width=width, eps=eps)
        place = closes.locate(planes)
        store(triton_pool.mean(pooled, channels, norm.dtype), closes.begin, place)
