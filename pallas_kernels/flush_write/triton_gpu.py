"""Triton kernels of `flush_csa` and `flush_hca`: pool, norm, rotate, quantise and store in place.

One program takes one closing token and one compressor, a channel per lane, so that a window's
tokens are folded in their order wherever the call was cut. CSA reads its 2M tokens from the call
or, before it, from the state; HCA goes on from the running pool, a chunk of tokens at a time while
the next one's loads are in flight. A program without a window ends after a few loads. Other
tilings pool tiles of a window's channels apart, means going through memory to a second launch, or
launch each compressor by itself; every one gives the same bits.

Bytes: every value and score of the call once (an element belongs to one window), the entries, and
no intermediate result but the means of such a tiling. At thousands of windows memory bounds HCA,
and CSA the time between a program's loads and its stores, of which an SM overlaps five; at a few
windows a chain of loads, exponentials and reductions does.

H200, microseconds of the kernel alone (fp8_ue8m0, one request from position 0; share of 4.3 TB/s
for the bytes above): CSA main 24.3 at 8192 tokens (65 %) and 84.2 at 32768 (75 %), index keys 9.0,
both in one launch 33.8; HCA 15.2 (51 %: 64 windows leave half of the SMs idle) and 35.5 (88 %).
Decode, all of 64 requests closing: CSA main and index 5.1, HCA 2.5. CSA was pooled as a running
softmax then, twice the instructions of two passes.

Tried for CSA: 2 warps 27.6, 8 warps 24.8. For HCA at 8192 tokens: 4 warps 19.7, 16 warps 15.8, 8
tokens a chunk 17.8; at 32768, 16 a chunk 39.0. Before one of two exponentials went, libdevice's
exp, sine and cosine were replaced, and loads of the next chunk were put in front: CSA 47 and HCA 35
by the clock. It compiles for Blackwell and has not run there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.codecs import Codec, Planes
from pallas_kernels.flush_write import tile as entry_tile
from pallas_kernels.flush_write.closing import Closing, prepare_store, read_closing
from pallas_kernels.flush_write.pooling import Channels, PoolCSA, PoolHCA, Pooling, ReadMean
from pallas_kernels.flush_write.tiling import Tiling, choose_csa, choose_hca

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
    widths = [_all_channels(flush.norm, flush.codec).width for flush in flushes]
    for flush, width in zip(flushes, widths, strict=True):
        own = dataclasses.replace(tiling, warps=max(1, tiling.warps * width // max(widths)))
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
    num_programs = min(tiling.programs or num_windows, num_windows)

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
            if num_programs == num_windows:
                closes, is_one = read_closing(call_refs, program, rate)
                pl.when((chosen == number) & is_one)(functools.partial(finish, closes))
                continue
            read = functools.partial(read_closing, call_refs, rate=rate)
            many = functools.partial(_finish_many, finish, read, program, num_programs, num_windows)
            pl.when(chosen == number)(many)

    words = [triton.as_words(flush.pool) for flush in flushes]
    written = iter(
        triton.launch(
            kernel,
            grid=(num_programs, len(flushes)),
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
    channels = min(tiling.channels, dim)
    assert dim % channels == 0

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
    loaded: Any = None,
) -> None:
    """Loads of the window and of what finishes it are in flight together."""
    channels = _all_channels(norm, codec)
    if loaded is None:
        loaded = pooling.load(arrays, closes, channels)
    store = prepare_store(planes, codec, norm, frequencies, closes, width=channels.width, eps=eps)
    store(pooling.finish(arrays, closes, channels, loaded))


def _finish_many(
    finish: functools.partial[None],
    read: Callable[[jax.Array], tuple[Closing, jax.Array]],
    program: jax.Array,
    num_programs: int,
    num_windows: int,
) -> None:
    """Every `num_programs`-th window; while one is finished, the next one's loads are in flight."""
    _, arrays, norm, _ = finish.args
    pooling, codec = finish.keywords["pooling"], finish.keywords["codec"]
    channels = _all_channels(norm, codec)

    def load(number: jax.Array) -> Any:
        closes, _ = read(jnp.minimum(number, num_windows - 1))
        return pooling.load(arrays, closes, channels)

    def body(i: jax.Array, loaded: Any) -> Any:
        number = program + i * num_programs
        ahead = load(number + num_programs)
        closes, is_one = read(jnp.minimum(number, num_windows - 1))
        inside = is_one & (number < num_windows)
        pl.when(inside)(functools.partial(finish, closes, loaded=loaded))
        return ahead

    jax.lax.fori_loop(0, -(-num_windows // num_programs), body, load(program))


def _all_channels(norm: Ref, codec: Codec) -> Channels:
    return Channels(0, norm.shape[0], entry_tile.tile_width(codec, norm.shape[0]))
