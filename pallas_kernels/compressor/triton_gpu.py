"""Triton kernels of `flush_csa` and `flush_hca`: pool, norm, rotate, encode and store in place.

One program takes one closing token and one compressor, a channel per lane, so that a window's
tokens are pooled in their order wherever the call was cut. CSA reads its 2M tokens from the call
or, before it, from the state; HCA goes on from the running pool, a chunk of tokens at a time while
the next one's loads are in flight. Where most windows lie in the call, its rows are loaded before
it is known whether a window needs them. A program whose token is -1 ends at once. `tiling.py` says
when each CSA compressor has a launch to itself, and when HCA pools tiles of channels, whose means
go through memory to a second launch. Every tiling gives the same bits.

Bytes: every value and score of the call once, the entries, and no intermediate result but the means
of such tiles; L2 drops rows first. At thousands of windows memory bounds both, at a few a chain of
loads, exponentials and reductions.

Limits: a codec without a form for a tile raises `NotImplementedError`. The kernels compile for
Blackwell and have not run there. Figures and roads not taken: docs/kernels/compressor.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.compressor.reference import Compressor, Windows
from pallas_kernels.compressor.tiling import Tiling, choose_csa, choose_hca, warps_apart
from pallas_kernels.compressor.triton_closing import (
    PLACE_FIELDS,
    load_place,
    prepare_store,
    read_closing,
    read_token,
    store_place,
)
from pallas_kernels.compressor.triton_means import Channels, PoolCSA, PoolHCA, Pooling
from pallas_kernels.gpu import triton, triton_codecs

Ref = Any
_FINISH_WARPS = 4


def flush_csa(
    compressors: Sequence[Compressor], windows: Windows, *, tiling: Tiling | None = None
) -> tuple[Planes, ...]:
    """See `op.flush_csa`."""
    num_windows = windows.closing.shape[0]
    tiling = tiling or choose_csa(num_windows)
    eager = num_windows < windows.call.positions.shape[0]
    flushes = [
        _Flush(
            compressor.pool,
            compressor.codec,
            _state_and_rows(compressor),
            compressor.norm,
            PoolCSA(compressor.norm.dtype, windows.rate, eager),
        )
        for compressor in compressors
    ]
    call = _call_arrays(windows)
    run = functools.partial(_flush_windows, call=call, windows=windows, name="flush_csa")
    if not tiling.apart:
        return run(flushes, num_warps=tiling.warps)
    written: list[Planes] = []
    for flush in flushes:
        written += run([flush], num_warps=warps_apart(_all_channels(flush.norm, flush.codec).width))
    return tuple(written)


def flush_hca(compressor: Compressor, windows: Windows, *, tiling: Tiling | None = None) -> Planes:
    """See `op.flush_hca`."""
    call, rate = windows.call, windows.rate
    num_windows, num_tokens = windows.closing.shape[0], call.positions.shape[0]
    tiling = tiling or choose_hca(num_windows, num_tokens)
    chunk = min(tiling.chunk, call.max_row_tokens, rate, num_tokens)
    flush = _Flush(
        compressor.pool,
        compressor.codec,
        _state_and_rows(compressor),
        compressor.norm,
        PoolHCA(compressor.norm.dtype, rate, chunk, eager=num_windows < num_tokens),
    )
    call_arrays = _call_arrays(windows)
    if tiling.channels:
        means, places = _pool_tiles(flush, call_arrays, rate, tiling)
        return _finish_means(flush, means, places, windows.frequencies, windows.eps)
    (written,) = _flush_windows(
        [flush], call=call_arrays, windows=windows, num_warps=tiling.warps, name="flush_hca"
    )
    return written


def _call_arrays(windows: Windows) -> list[jax.Array]:
    """What programs read of the call, in the order of `triton_closing.read_closing`."""
    call = windows.call
    per_token = [call.segment_ids, call.slots, call.positions, call.lengths]
    return [windows.layer.reshape(1), windows.closing, *per_token, call.block_table]


def _state_and_rows(compressor: Compressor) -> list[jax.Array]:
    state, rows = compressor.state, compressor.rows
    kept = [state["values"], state["scores"]] if isinstance(state, dict) else [state]
    return [*kept, rows["values"], rows["scores"]]


class _Flush(NamedTuple):
    """One compressor's share of a launch: where entries go, and what they are pooled from."""

    pool: Planes
    codec: Codec
    arrays: list[jax.Array]
    norm: jax.Array
    pooling: Pooling


def _flush_windows(
    flushes: Sequence[_Flush],
    *,
    call: Sequence[jax.Array],
    windows: Windows,
    num_warps: int,
    name: str,
) -> tuple[Planes, ...]:
    """Programs of whole windows, for each compressor."""
    rate, eps = windows.rate, windows.eps

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        call_refs, frequencies_ref = inputs[: len(call)], inputs[len(call)]
        refs, stored_refs = iter(inputs[len(call) + 1 :]), iter(stored)
        program, chosen = pl.program_id(0), pl.program_id(1)
        token = read_token(call_refs, program)
        for number, flush in enumerate(flushes):
            flush_window = functools.partial(
                _flush_window,
                {plane: next(stored_refs) for plane in flush.pool},
                [next(refs) for _ in flush.arrays],
                next(refs),
                frequencies_ref,
                call_refs,
                token,
                pooling=flush.pooling,
                codec=flush.codec,
                rate=rate,
                eps=eps,
            )
            pl.when((chosen == number) & (token >= 0))(flush_window)

    words = [triton.as_words(flush.pool) for flush in flushes]
    written = iter(
        triton.launch(
            kernel,
            grid=(call[1].shape[0], len(flushes)),
            inputs=[*call, windows.frequencies, *(x for f in flushes for x in (*f.arrays, f.norm))],
            in_place=[plane for pool in words for plane in pool.values()],
            num_warps=num_warps,
            name=name,
        )
    )
    return tuple(
        triton.from_words({plane: next(written) for plane in f.pool}, f.pool) for f in flushes
    )


def _flush_window(
    planes: dict[str, Ref],
    arrays: Sequence[Ref],
    norm: Ref,
    frequencies: Ref,
    call_refs: Sequence[Ref],
    token: jax.Array,
    *,
    pooling: Pooling,
    codec: Codec,
    rate: int,
    eps: float,
) -> None:
    """Loads wait for the token alone, but for those of the table and of windows cut by the call."""
    channels = _all_channels(norm, codec)
    loaded = pooling.load(arrays, token, channels)
    store = prepare_store(planes, codec, norm, frequencies, width=channels.width, eps=eps)
    closes = read_closing(call_refs, token, rate)
    mean = pooling.finish(arrays, closes, channels, loaded)
    store(mean, closes.begin, closes.locate(planes))


def _pool_tiles(
    flush: _Flush, call: Sequence[jax.Array], rate: int, tiling: Tiling
) -> tuple[jax.Array, jax.Array]:
    """The windows' means [n, C], by programs of `tiling.channels` channels each, and their places.

    The program of a window's first tile finds its place while others pool.
    """
    num_windows, dim = call[1].shape[0], flush.norm.shape[0]
    channels = math.gcd(tiling.channels, dim)

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        number, tile = pl.program_id(0), pl.program_id(1)
        call_refs, refs = inputs[: len(call)], inputs[len(call) :]
        means, places = outputs
        token = read_token(call_refs, number)
        width = max(32, 1 << (channels - 1).bit_length())
        own = Channels(tile * channels, channels, width)

        @pl.when(token >= 0)
        def _pool() -> None:
            loaded = flush.pooling.load(refs, token, own)
            closes = read_closing(call_refs, token, rate)
            mean = flush.pooling.finish(refs, closes, own, loaded).astype(flush.norm.dtype)
            triton.store_row(means, (number,), mean, first=0, start=own.start, count=channels)

        @pl.when(tile == 0)
        def _place() -> None:
            closes = read_closing(call_refs, jnp.maximum(token, 0), rate)
            store_place(places, number, token >= 0, closes.begin, closes.locate(flush.pool))

    means, places = triton.launch(
        kernel,
        grid=(num_windows, dim // channels),
        inputs=[*call, *flush.arrays],
        outputs=[
            jax.ShapeDtypeStruct((num_windows, dim), flush.norm.dtype),
            jax.ShapeDtypeStruct((num_windows, PLACE_FIELDS), jnp.int32),
        ],
        num_warps=tiling.pool_warps,
        name="flush_hca_pool",
    )
    return means, places


def _finish_means(
    flush: _Flush, means: jax.Array, places: jax.Array, frequencies: jax.Array, eps: float
) -> Planes:
    """Every load of a program is of its window's number alone: it waits for one, not for three.

    Without a window it finishes what happens to lie there, and stores nothing.
    """

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        means_ref, places_ref, norm, frequencies_ref = inputs
        number, channels = pl.program_id(0), _all_channels(norm, flush.codec)
        planes = dict(zip(flush.pool, stored, strict=True))
        mean = triton.load_row(means_ref, (number,), **channels.columns).astype(jnp.float32)
        begin, place = load_place(places_ref, number)
        width = channels.width
        store = prepare_store(planes, flush.codec, norm, frequencies_ref, width=width, eps=eps)
        store(mean, begin, place)

    written = triton.launch(
        kernel,
        grid=(means.shape[0],),
        inputs=[means, places, flush.norm, frequencies],
        in_place=[*triton.as_words(flush.pool).values()],
        num_warps=_FINISH_WARPS,
        name="flush_hca",
    )
    return triton.from_words(dict(zip(flush.pool, written, strict=True)), flush.pool)


def _all_channels(norm: Ref, codec: Codec) -> Channels:
    return Channels(0, norm.shape[0], triton_codecs.tile_width(codec, norm.shape[0]))
