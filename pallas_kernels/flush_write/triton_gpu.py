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
from jax.typing import DTypeLike

from pallas_kernels import triton
from pallas_kernels.compress_tail import tile as window
from pallas_kernels.flush_write import tile as entry_tile
from pallas_kernels.flush_write.closing import Closing, prepare_store, read_closing
from pallas_kernels.flush_write.tiling import Tiling, choose_csa, choose_hca
from pallas_kernels.formats import Codec, Planes

Ref = Any
PoolTile = Callable[..., Callable[[], jax.Array]]
"""pool(refs, closes, start=, count=, width=) starts loads; what it returns gives the mean."""
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
            functools.partial(_pool_csa, dtype=norm.dtype, eager=eager),
        )
        for pool, state, new, norm, codec in zip(pools, states, rows, norms, codecs, strict=True)
    ]
    run = functools.partial(_run, call=call, frequencies=frequencies, rate=rate, eps=eps)
    if not tiling.apart:
        return run(flushes, tiling=tiling, name="flush_csa")
    written: list[Planes] = []
    widest = max(norm.shape[0] for norm in norms)
    for flush in flushes:
        warps = max(1, tiling.warps * flush.norm.shape[0] // widest)
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
    flush = _Flush(
        pool, codec, arrays, norm, functools.partial(_pool_hca, dtype=norm.dtype, chunk=chunk)
    )
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
    pool_tile: PoolTile


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
    """A program per window and compressor; with `tiling.channels` it finds the window's mean."""
    means = None
    if tiling.channels:
        means = [_pool_apart(flush, call, rate, tiling, f"{name}_pool") for flush in flushes]
    sources = [f.arrays for f in flushes] if means is None else [[mean] for mean in means]

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        call_refs, frequencies_ref = inputs[: len(call)], inputs[len(call)]
        refs, stored_refs = iter(inputs[len(call) + 1 :]), iter(stored)
        window_number, chosen = pl.program_id(0), pl.program_id(1)
        closes, is_one = read_closing(call_refs, window_number, rate)
        for number, (flush, arrays) in enumerate(zip(flushes, sources, strict=True)):
            finish = functools.partial(
                _finish,
                {plane: next(stored_refs) for plane in flush.pool},
                [next(refs) for _ in arrays],
                next(refs),
                frequencies_ref,
                closes,
                codec=flush.codec,
                eps=eps,
                pool_tile=flush.pool_tile
                if means is None
                else functools.partial(_read_mean, number=window_number),
            )
            pl.when((chosen == number) & is_one)(finish)

    words = [triton.as_words(flush.pool) for flush in flushes]
    written = iter(
        triton.launch(
            kernel,
            grid=(call[1].shape[0], len(flushes)),
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
        place = {"start": tile * channels, "count": channels}
        width = max(32, 1 << (channels - 1).bit_length())

        @pl.when(is_one)
        def _pool() -> None:
            mean = flush.pool_tile(inputs[len(call) :], closes, **place, width=width)()
            values = mean.astype(flush.norm.dtype)
            triton.store_row(outputs[0], (number,), values, first=0, **place)

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
    codec: Codec,
    eps: float,
    pool_tile: PoolTile,
) -> None:
    """Loads of the window and of what finishes it are in flight together."""
    dim = norm.shape[0]
    width = entry_tile.tile_width(codec, dim)
    pool = pool_tile(arrays, closes, start=0, count=dim, width=width)
    store = prepare_store(planes, codec, norm, frequencies, closes, width=width, eps=eps)
    store(pool())


def _read_mean(
    refs: Sequence[Ref], closes: Closing, *, number: jax.Array, start: int, count: int, width: int
) -> Callable[[], jax.Array]:
    """A mean that another launch has found."""
    del closes
    mean = triton.load_row(refs[0], (number,), start=start, count=count, width=width)
    return lambda: mean.astype(jnp.float32)


def _pool_csa(
    refs: Sequence[Ref],
    closes: Closing,
    *,
    dtype: DTypeLike,
    eager: bool,
    start: jax.Array | int,
    count: int,
    width: int,
) -> Callable[[], jax.Array]:
    """The b-stream of the window before, then the a-stream of the own one: 2M tokens.

    Args:
      refs: values and scores of the state, then of the call.
      closes: the window.
      dtype: of activations.
      eager: whether most windows lie in the call; then its rows are loaded before that is known.
      start: first channel of the entry.
      count: channels.
      width: lanes.
    """
    load = functools.partial(triton.load_row, count=count, width=width)
    rate, channels = closes.rate, refs[0].shape[-1] // 2
    first = closes.position - (2 * rate - 1)
    places = []  # of each token: its row of the call, its row of the state, its first channel
    for back in range(2 * rate - 1, -1, -1):
        kept = jnp.maximum(closes.position - back, 0) % (2 * rate)
        places.append(
            (
                (jnp.maximum(closes.token - back, 0),),
                (closes.layer, closes.slot, kept),
                start + (0 if back >= rate else channels),
            )
        )

    def merged() -> window.Pool:
        """Tokens of the state where they came before the call."""
        tokens = []
        for number, (row, kept, column) in enumerate(places):
            in_call = first + number >= closes.length
            tokens.append(
                [
                    window.select(
                        in_call,
                        load(new, row, start=column, live=in_call),
                        load(old, kept, start=column, live=~in_call),
                    )
                    for old, new in zip(refs[:2], refs[2:], strict=True)
                ]
            )
        return window.pool_overlapping(tokens, closes.position >= rate)

    rows = [[load(ref, row, start=at) for ref in refs[2:]] for row, _, at in places if eager]

    def pool() -> window.Pool:
        if not eager:
            return merged()
        all_in_call = first >= closes.length
        return jax.lax.cond(all_in_call, window.pool_tokens, lambda _: merged(), rows)

    return lambda: window.mean(pool(), count, dtype)


def _pool_hca(
    refs: Sequence[Ref],
    closes: Closing,
    *,
    dtype: DTypeLike,
    chunk: int,
    start: jax.Array | int,
    count: int,
    width: int,
) -> Callable[[], jax.Array]:
    """What the running pool holds of the window, then its tokens of this call; see `_pool_csa`."""
    running, *rows = refs
    begin = closes.position - (closes.rate - 1)
    first = jnp.maximum(begin, closes.length)
    place = {"start": start, "count": count}
    carried = window.continue_pool(
        running, (closes.layer, closes.slot), begin < closes.length, **place, width=width
    )

    def pool() -> jax.Array:
        pooled = window.fold_tokens(
            carried,
            rows,
            first=closes.token - (closes.position - first),
            num_tokens=closes.position - first + 1,
            chunk=chunk,
            **place,
        )
        return window.mean(pooled, count, dtype)

    return pool
