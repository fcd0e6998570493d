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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.append_and_flush.reference import Appended, Arguments
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.compressor import triton_pool
from pallas_kernels.compressor.reference import Compressor
from pallas_kernels.compressor.triton_closing import Closing, prepare_store
from pallas_kernels.encode_tokens import triton_token
from pallas_kernels.gpu import triton, triton_codecs, triton_heads
from pallas_kernels.round_index_queries import triton_heads_rounding

Ref = Any
_NUM_WARPS = 4


def append_and_flush(arguments: Arguments) -> Appended:
    """See `op.append_and_flush`."""
    queries, kv, ring, compressors, call, norm_rope, rate, index_queries, index_codec = arguments
    num_tokens, num_heads, _ = queries.shape
    window, eps = ring.planes, norm_rope.eps
    num_tiles = triton_heads.num_head_tiles(num_heads)
    to_round = [] if index_queries is None else [index_queries]
    num_index_tiles = sum(triton_heads.num_head_tiles(heads.shape[1]) for heads in to_round)
    shapes = {
        name: jax.ShapeDtypeStruct((num_tokens, *plane.shape[3:]), plane.dtype)
        for name, plane in window.items()
    }
    table = [call.block_table] if compressors else []
    indices = [ring.layer.reshape(1), call.segment_ids, call.slots, call.positions, *table]
    inputs = [*indices, queries, kv, norm_rope.weight, norm_rope.frequencies]
    in_place = [*triton.as_words(window).values()]
    for compressor in compressors:
        inputs += [compressor.rows["values"], compressor.rows["scores"], compressor.norm]
        in_place += [*_state_arrays(compressor), *triton.as_words(compressor.pool).values()]
    inputs += to_round

    def kernel(input_refs: list[Ref], stored_refs: list[Ref]) -> None:
        read, stored = iter(input_refs), iter(stored_refs)
        call_refs = [next(read) for _ in indices]
        queries_ref, kv_ref, norm_ref, frequencies_ref = (next(read) for _ in range(4))
        token, part = pl.program_id(0), pl.program_id(1)
        closes = _read_token(call_refs, token, rate)
        live = call_refs[2][token] >= 0
        ring_refs = {name: next(stored) for name in window}
        for number, compressor in enumerate(compressors):
            append = functools.partial(
                _append_csa if isinstance(compressor.state, dict) else _append_hca,
                _Refs(
                    [next(stored) for _ in _state_arrays(compressor)],
                    {name: next(stored) for name in compressor.pool},
                    [next(read) for _ in range(3)],
                    frequencies_ref,
                ),
                closes,
                codec=compressor.codec,
                eps=eps,
            )
            pl.when((part == number) & live)(append)
        rotated_ref = next(stored)
        row_refs = {name: next(stored) for name in shapes}
        rotate_part = len(compressors) + 1
        round_part = rotate_part + num_tiles

        @pl.when(part == len(compressors))
        def _append_window() -> None:
            entry = triton_token.encode_entry(
                kv_ref,
                norm_ref,
                frequencies_ref,
                token,
                closes.position,
                codec=ring.codec,
                eps=eps,
            )
            triton_codecs.store_entry(row_refs, (token,), entry)
            size = next(iter(window.values())).shape[2]
            at = (closes.layer, closes.slot, closes.position % size)
            pl.when(live)(functools.partial(triton_codecs.store_entry, ring_refs, at, entry))

        rotates = part >= rotate_part
        if index_codec is not None:
            rotates &= part < round_part

        @pl.when(rotates)
        def _rotate() -> None:
            heads = triton_heads.Heads(queries_ref, rotated_ref, token, part - rotate_part)
            triton_token.rotate_heads(heads, frequencies_ref, closes.position, eps=eps)

        if index_codec is not None:
            round_heads = functools.partial(
                triton_heads_rounding.round_heads,
                triton_heads.Heads(next(read), next(stored), token, part - round_part),
                frequencies_ref,
                closes.position,
                codec=index_codec,
            )
            pl.when(part >= round_part)(round_heads)

    written = iter(
        triton.launch(
            kernel,
            grid=(num_tokens, len(compressors) + 1 + num_tiles + num_index_tiles),
            inputs=inputs,
            in_place=in_place,
            outputs=[
                jax.ShapeDtypeStruct(queries.shape, queries.dtype),
                *triton.word_shapes(shapes).values(),
                *(jax.ShapeDtypeStruct(heads.shape, heads.dtype) for heads in to_round),
            ],
            num_warps=_NUM_WARPS,
            name="append_and_flush",
        )
    )

    def take(planes: Planes) -> Planes:
        return triton.from_words({name: next(written) for name in planes}, planes)

    new_window = take(window)
    states: list[Planes | jax.Array] = []
    pools: list[Planes] = []
    for compressor in compressors:
        if isinstance(compressor.state, dict):
            states.append({name: next(written) for name in ("values", "scores")})
        else:
            states.append(next(written))
        pools.append(take(compressor.pool))
    rotated = next(written)
    rows = triton.from_words({name: next(written) for name in shapes}, shapes)
    return Appended(rotated, rows, new_window, tuple(states), tuple(pools), next(written, None))


def _state_arrays(compressor: Compressor) -> list[jax.Array]:
    state = compressor.state
    return [state["values"], state["scores"]] if isinstance(state, dict) else [state]


def _read_token(call_refs: Sequence[Ref], token: jax.Array, rate: int) -> Closing:
    """The program's token; whether it closes a window, its position says."""
    layer, segment_ids, slots, positions, *table = call_refs
    position, slot = positions[token], jnp.maximum(slots[token], 0)
    return Closing(
        layer[0], token, segment_ids[token], slot, position, position, rate, *(table or [None])
    )


class _Refs(NamedTuple):
    """What a program of a compressor reads and writes.

    Attributes:
      state: values and scores of CSA, the running pool of HCA.
      planes: the pool's.
      rows: the call's values and scores, and the norm's weight.
      frequencies: f32[R / 2].
    """

    state: Sequence[Ref]
    planes: dict[str, Ref]
    rows: Sequence[Ref]
    frequencies: Ref


def _append_csa(compressor: _Refs, closes: Closing, *, codec: Codec, eps: float) -> None:
    """Keeps the token's values and scores; a closing window pools 2M - 1 kept rows and them."""
    state, planes, (*new, norm), frequencies = compressor
    channels, period = norm.shape[0], 2 * closes.rate
    width = triton_codecs.tile_width(codec, channels)

    @pl.when((closes.position + 1) % closes.rate == 0)
    def _flush() -> None:
        tokens = []
        for back in range(period - 1, -1, -1):
            kept = jnp.maximum(closes.position - back, 0) % period
            refs, row = (
                (state, (closes.layer, closes.slot, kept)) if back else (new, (closes.token,))
            )
            start = 0 if back >= closes.rate else channels
            tokens.append(
                [triton.load_row(r, row, start=start, count=channels, width=width) for r in refs]
            )
        store = prepare_store(planes, codec, norm, frequencies, width=width, eps=eps)
        place = closes.locate(planes)
        pooled = triton_pool.pool_overlapping(tokens, closes.position >= closes.rate)
        store(triton_pool.mean(pooled, channels, norm.dtype), closes.begin, place)

    for source, target in zip(new, state, strict=True):
        at = (closes.layer, closes.slot, closes.position % period)
        triton.copy_row(source, (closes.token,), target, at)


def _append_hca(compressor: _Refs, closes: Closing, *, codec: Codec, eps: float) -> None:
    """Folds the token into the running pool; where that closes the window, empties it."""
    (running,), planes, (*new, norm), frequencies = compressor
    channels = norm.shape[0]
    width = triton_codecs.tile_width(codec, channels)
    at, lanes = (closes.layer, closes.slot), {"start": 0, "count": channels, "width": width}
    ends = (closes.position + 1) % closes.rate == 0
    pooled = triton_pool.fold(
        triton_pool.continue_pool(running, at, closes.position % closes.rate > 0, **lanes),
        *(triton.load_row(ref, (closes.token,), **lanes) for ref in new),
    )
    kept = triton_pool.select_pool(ends, triton_pool.empty_pool(width), pooled)
    for number, part in enumerate(kept):
        triton.store_row(running, (*at, number), part, first=0, count=channels)

    @pl.when(ends)
    def _flush() -> None:
        store = prepare_store(planes, codec, norm, frequencies, width=width, eps=eps)
        place = closes.locate(planes)
        store(triton_pool.mean(pooled, channels, norm.dtype), closes.begin, place)
