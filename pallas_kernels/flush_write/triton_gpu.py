"""Triton kernels of `flush_csa` and `flush_hca`: pool, norm, rotate, quantise and store in place.

One program takes one closing token and one compressor, a channel per lane, so that a window's
tokens are folded in their order wherever the call was cut. CSA reads its 2M tokens from the call
or, before it, from the state; HCA goes on from the running pool, a chunk of tokens at a time while
the next one's loads are in flight. A program without a window ends after a few loads. Of many
windows each CSA compressor has a launch to itself, with warps as its lanes ask for; of few long
ones HCA pools tiles of channels apart, means going through memory to a second launch. Every tiling
gives the same bits.

Bytes: every value and score of the call once (an element belongs to one window), the entries, and
no intermediate result but the means of such a tiling. At thousands of windows memory bounds both;
at a few a chain of loads, exponentials and reductions does.

H200, microseconds in several runs (fp8_ue8m0, one request from position 0; share of 4.27 TB/s for
the bytes above, after 3 us of launch), at 8192 and 32768 tokens: CSA main 23.0 to 23.4 (78 to 80 %)
and 78.3 to 79.0 (84 to 85 %), index keys 7.9 to 8.6 (72 to 81 %) and 20.3 to 20.6 (90 to 91 %),
both 30.5 to 31.7 (70 to 73 %) and 98.6 to 99.5 (83 %); HCA 13.8 to 14.9 (66 to 73 %) and 35.2 to
36.9 (93 to 98 %). What is below 80 % has two launches, but for calls of 8 us and main at 8192
tokens. At 2048 tokens CSA takes 10.5 for both, HCA 7.0.

Tried there for CSA: both in one launch of 4 warps 31.0 and 115 (10.5 at 2048 tokens, where two take
11.6), of 2 warps 30.7 and 114; main of 4 warps 23.3 and 79.9; index keys of 4 warps 8.6 and 24.0,
of 2 7.9 and 23.6; pooling apart 35.5 and 118; fewer programs, each with the next window's loads in
flight while it finishes one, 41.8 to 48 and 137 to 173. For HCA at 8192 tokens: windows whole 15.7
(11.2 at 2048), with 16 warps 16.1, 32 tokens a chunk 16.4; tiles of 256 channels 14.0, of 64 15.7,
8 tokens a chunk 18.3. It compiles for Blackwell and has not run there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.codecs import Codec, Planes
from pallas_kernels.flush_write import tile as entry_tile
from pallas_kernels.flush_write.closing import Closing, prepare_store, read_closing
from pallas_kernels.flush_write.pooling import Channels, PoolCSA, PoolHCA, Pooling, ReadMean
from pallas_kernels.flush_write.tiling import Tiling, choose_csa, choose_hca, warps_apart

Ref = Any
_FINISH_WARPS = 4


def flush_csa(
    pools: Sequence[Planes],
    states: Sequence[Planes],
    rows: Sequence[Planes],
    norms: Sequence[jax.Array],
    frequencies: jax.Array,
    block_table: jax.Array,
    *,
    codecs: Sequence[Codec],
    closing: jax.Array,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    tiling: Tiling | None = None,
) -> tuple[Planes, ...]:
    """See `op.flush_csa`."""
    call = [layer.reshape(1), closing, request_ids, slots, positions, lengths, block_table]
    tiling = tiling or choose_csa(closing.shape[0], positions.shape[0])
    eager = closing.shape[0] < positions.shape[0]
    flushes = [
        _Flush(
            pool,
            codec,
            [state["values"], state["scores"], new["values"], new["scores"]],
            norm,
            PoolCSA(norm.dtype, eager),
        )
        for pool, state, new, norm, codec in zip(pools, states, rows, norms, codecs, strict=True)
    ]
    run = functools.partial(_run, call=call, frequencies=frequencies, rate=rate, eps=eps)
    if not tiling.apart:
        return run(flushes, tiling=tiling, name="flush_csa")
    written: list[Planes] = []
    for flush in flushes:
        warps = warps_apart(_all_channels(flush.norm, flush.codec).width)
        own = dataclasses.replace(tiling, warps=warps)
        written += run([flush], tiling=own, name="flush_csa")
    return tuple(written)


def flush_hca(
    pool: Planes,
    running: jax.Array,
    rows: Planes,
    norm: jax.Array,
    frequencies: jax.Array,
    block_table: jax.Array,
    *,
    codec: Codec,
    closing: jax.Array,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    max_count: int,
    tiling: Tiling | None = None,
) -> Planes:
    """See `op.flush_hca`."""
    call = [layer.reshape(1), closing, request_ids, slots, positions, lengths, block_table]
    tiling = tiling or choose_hca(closing.shape[0], positions.shape[0])
    chunk = min(tiling.chunk, max_count, rate)
    arrays = [running, rows["values"], rows["scores"]]
    flush = _Flush(pool, codec, arrays, norm, PoolHCA(norm.dtype, chunk))
    (written,) = _run(
        [flush],
        call=call,
        frequencies=frequencies,
        rate=rate,
        eps=eps,
        tiling=tiling,
        name="flush_hca",
    )
    return written


class _Flush(NamedTuple):
    """One compressor's share of a launch: where entries go, and what they are pooled from."""

    pool: Planes
    codec: Codec
    arrays: list[jax.Array]
    norm: jax.Array
    pooling: Pooling


def _run(
    flushes: Sequence[_Flush],
    *,
    call: Sequence[jax.Array],
    frequencies: jax.Array,
    rate: int,
    eps: float,
    tiling: Tiling,
    name: str,
) -> tuple[Planes, ...]:
    """Programs of windows, for each compressor, which finish them, and mostly pool them first."""
    means = None
    if tiling.channels:
        means = [_pool_apart(flush, call, rate, tiling, f"{name}_pool") for flush in flushes]
    sources = [f.arrays for f in flushes] if means is None else [[mean] for mean in means]
    num_windows = call[1].shape[0]

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        call_refs, frequencies_ref = inputs[: len(call)], inputs[len(call)]
        refs, stored_refs = iter(inputs[len(call) + 1 :]), iter(stored)
        program, chosen = pl.program_id(0), pl.program_id(1)
        for number, (flush, arrays) in enumerate(zip(flushes, sources, strict=True)):
            pooling = flush.pooling if means is None else ReadMean(program)
            finish = functools.partial(
                _finish,
                {plane: next(stored_refs) for plane in flush.pool},
                [next(refs) for _ in arrays],
                next(refs),
                frequencies_ref,
                pooling=pooling,
                codec=flush.codec,
                eps=eps,
            )
            closes, is_one = read_closing(call_refs, program, rate)
            pl.when((chosen == number) & is_one)(functools.partial(finish, closes))

    words = [triton.as_words(flush.pool) for flush in flushes]
    written = iter(
        triton.launch(
            kernel,
            grid=(num_windows, len(flushes)),
            inputs=[
                *call,
                frequencies,
                *(a for f, arrays in zip(flushes, sources, strict=True) for a in (*arrays, f.norm)),
            ],
            in_place=[plane for pool in words for plane in pool.values()],
            num_warps=tiling.warps if means is None else _FINISH_WARPS,
            name=name,
        )
    )
    return tuple(
        triton.from_words({plane: next(written) for plane in f.pool}, f.pool) for f in flushes
    )


def _pool_apart(
    flush: _Flush, call: Sequence[jax.Array], rate: int, tiling: Tiling, name: str
) -> jax.Array:
    """[n, C], the windows' means, by programs of `tiling.channels` channels each."""
    num_windows, dim = call[1].shape[0], flush.norm.shape[0]
    channels = math.gcd(tiling.channels, dim)

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        number, tile = pl.program_id(0), pl.program_id(1)
        closes, is_one = read_closing(inputs[: len(call)], number, rate)
        width = max(32, 1 << (channels - 1).bit_length())
        place = Channels(tile * channels, channels, width)
        refs = inputs[len(call) :]

        @pl.when(is_one)
        def _pool() -> None:
            loaded = flush.pooling.load(refs, closes, place)
            mean = flush.pooling.finish(refs, closes, place, loaded).astype(flush.norm.dtype)
            triton.store_row(
                outputs[0], (number,), mean, first=0, start=place.start, count=channels
            )

    (means,) = triton.launch(
        kernel,
        grid=(num_windows, dim // channels),
        inputs=[*call, *flush.arrays],
        outputs=[jax.ShapeDtypeStruct((num_windows, dim), flush.norm.dtype)],
        num_warps=tiling.pool_warps,
        name=name,
    )
    return means


def _finish(
    planes: dict[str, Ref],
    arrays: Sequence[Ref],
    norm: Ref,
    frequencies: Ref,
    closes: Closing,
    *,
    pooling: Pooling,
    codec: Codec,
    eps: float,
) -> None:
    """Loads of the window and of what finishes it are in flight together."""
    channels = _all_channels(norm, codec)
    loaded = pooling.load(arrays, closes, channels)
    store = prepare_store(planes, codec, norm, frequencies, closes, width=channels.width, eps=eps)
    store(pooling.finish(arrays, closes, channels, loaded))


def _all_channels(norm: Ref, codec: Codec) -> Channels:
    return Channels(0, norm.shape[0], entry_tile.tile_width(codec, norm.shape[0]))
