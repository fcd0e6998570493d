"""Triton kernels of `flush_csa` and `flush_hca`: pool, norm, rotate, quantise and store in place.

One program takes one closing token and one compressor, a channel per lane, so that a window's
tokens are folded in their order wherever the call was cut. CSA reads its 2M tokens from the call
or, before it, from the state; HCA goes on from the running pool, a chunk of tokens at a time while
the next one's loads are in flight. A program without a window ends after a few loads.

Bytes: every value and score of the call once (an element belongs to one window), the entries, and
no intermediate result. At thousands of windows memory bounds HCA, and CSA the time between a
program's loads and its stores, of which an SM overlaps five; at a few windows a chain of loads,
exponentials and reductions does.

H200, microseconds of the kernel alone (fp8_ue8m0, one request from position 0; share of 4.3 TB/s
for the bytes above): CSA main 24.3 at 8192 tokens (65 %) and 84.2 at 32768 (75 %), index keys 9.0,
both in one launch 33.8; HCA 15.2 (51 %: 64 windows leave half of the SMs idle) and 35.5 (88 %).
Decode, all of 64 requests closing: CSA main and index 5.1, HCA 2.5.

Tried for CSA: 2 warps 27.6, 8 warps 24.8. For HCA at 8192 tokens: 4 warps 19.7, 16 warps 15.8, 8
tokens a chunk 17.8; at 32768, 16 a chunk 39.0. Before one of two exponentials went, libdevice's
exp, sine and cosine were replaced, and loads of the next chunk were put in front: CSA 47 and HCA 35
by the clock. It compiles for Blackwell and has not run there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.compress_tail import tile as window
from pallas_kernels.flush_write import tile as entry_tile
from pallas_kernels.flush_write.closing import Closing, prepare_store, read_closing
from pallas_kernels.formats import Codec, Planes

Ref = Any
_CSA_WARPS = 4
_HCA_WARPS = 8
_FEW_WINDOWS = 132  # of an H200's SMs


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
) -> tuple[Planes, ...]:
    """See `op.flush_csa`."""
    call = [layer.reshape(1), closing, request_ids, slots, positions, lengths, block_table]
    compressors = [
        [state["values"], state["scores"], new["values"], new["scores"], norm]
        for state, new, norm in zip(states, rows, norms, strict=True)
    ]

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        call_refs, frequencies_ref = inputs[: len(call)], inputs[len(call)]
        refs, stored_refs = iter(inputs[len(call) + 1 :]), iter(stored)
        closes, is_one = read_closing(call_refs, pl.program_id(0), rate)
        chosen = pl.program_id(1)
        for number, (pool, codec, arrays) in enumerate(
            zip(pools, codecs, compressors, strict=True)
        ):
            compress = functools.partial(
                _compress_csa,
                {name: next(stored_refs) for name in pool},
                [next(refs) for _ in arrays],
                frequencies_ref,
                closes,
                codec=codec,
                eps=eps,
                eager=closing.shape[0] < positions.shape[0],
            )
            pl.when((chosen == number) & is_one)(compress)

    return _launch(
        kernel,
        (closing.shape[0], len(pools)),
        [*call, frequencies, *(array for arrays in compressors for array in arrays)],
        pools,
        num_warps=_CSA_WARPS,
        name="flush_csa",
    )


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
) -> Planes:
    """See `op.flush_hca`."""
    call = [layer.reshape(1), closing, request_ids, slots, positions, lengths, block_table]
    chunk = min(_hca_chunk(closing.shape[0]), max_count, rate)

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        call_refs, arrays = inputs[: len(call)], inputs[len(call) :]
        planes = dict(zip(pool, stored, strict=True))
        closes, is_one = read_closing(call_refs, pl.program_id(0), rate)
        compress = functools.partial(
            _compress_hca, planes, arrays, closes, codec=codec, eps=eps, chunk=chunk
        )
        pl.when(is_one)(compress)

    (written,) = _launch(
        kernel,
        (closing.shape[0],),
        [*call, running, rows["values"], rows["scores"], norm, frequencies],
        [pool],
        num_warps=_HCA_WARPS,
        name="flush_hca",
    )
    return written


def _hca_chunk(num_windows: int) -> int:
    """Tokens whose loads are in flight: many while a program has an SM to itself."""
    return 16 if num_windows <= _FEW_WINDOWS else 8


def _compress_csa(
    planes: dict[str, Ref],
    arrays: Sequence[Ref],
    frequencies: Ref,
    closes: Closing,
    *,
    codec: Codec,
    eps: float,
    eager: bool,
) -> None:
    """The b-stream of the window before, then the a-stream of the own one: 2M tokens."""
    *sources, norm = arrays
    width = entry_tile.tile_width(codec, norm.shape[0])
    rows = None
    if eager:
        rows = [
            [
                triton.load_row(ref, row, start=start, count=norm.shape[0], width=width)
                for ref in sources[2:]
            ]
            for row, start in _window_rows(closes, norm.shape[0])
        ]
    store = prepare_store(planes, codec, norm, frequencies, closes, width=width, eps=eps)
    merged = functools.partial(_pool_merged, sources, closes, width=width)
    if rows is None:
        store(merged())
        return
    all_in_call = closes.position - (2 * closes.rate - 1) >= closes.length
    store(jax.lax.cond(all_in_call, window.pool_tokens, lambda _: merged(), rows))


def _window_rows(closes: Closing, channels: int) -> list[tuple[tuple[jax.Array], int]]:
    """Each of a CSA window's 2M tokens, in order: its row of the call, and its first channel."""
    rate = closes.rate
    return [
        ((jnp.maximum(closes.token - back, 0),), 0 if back >= rate else channels)
        for back in range(2 * rate - 1, -1, -1)
    ]


def _pool_merged(sources: Sequence[Ref], closes: Closing, *, width: int) -> window.Pool:
    """Pools 2M tokens, of the state where they came before the call; the first window has M."""
    rate, channels = closes.rate, sources[0].shape[-1] // 2
    load = functools.partial(triton.load_row, count=channels, width=width)
    tokens = []
    for number, (row, start) in enumerate(_window_rows(closes, channels)):
        position = closes.position - (2 * rate - 1) + number
        in_call = position >= closes.length
        kept = (closes.layer, closes.slot, jnp.maximum(position, 0) % (2 * rate))
        tokens.append(
            [
                window.select(
                    in_call,
                    load(new_ref, row, start=start, live=in_call),
                    load(old_ref, kept, start=start, live=~in_call),
                )
                for old_ref, new_ref in zip(sources[:2], sources[2:4], strict=True)
            ]
        )
    return window.pool_overlapping(tokens, closes.position >= rate)


def _compress_hca(
    planes: dict[str, Ref],
    arrays: Sequence[Ref],
    closes: Closing,
    *,
    codec: Codec,
    eps: float,
    chunk: int,
) -> None:
    """What the running pool holds of the window, then its tokens of this call."""
    running, values, scores, norm, frequencies = arrays
    width = entry_tile.tile_width(codec, norm.shape[0])
    store = prepare_store(planes, codec, norm, frequencies, closes, width=width, eps=eps)
    begin = closes.position - (closes.rate - 1)
    first = jnp.maximum(begin, closes.length)
    at = (closes.layer, closes.slot)
    channels = {"start": 0, "count": norm.shape[0]}
    store(
        window.fold_tokens(
            window.continue_pool(running, at, begin < closes.length, **channels, width=width),
            (values, scores),
            first=closes.token - (closes.position - first),
            num_tokens=closes.position - first + 1,
            chunk=chunk,
            **channels,
        )
    )


def _launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Sequence[jax.Array],
    pools: Sequence[Planes],
    *,
    num_warps: int,
    name: str,
) -> tuple[Planes, ...]:
    words = [triton.as_words(pool) for pool in pools]
    planes = [plane for pool in words for plane in pool.values()]
    written = iter(
        triton.launch(
            kernel, grid=grid, inputs=inputs, in_place=planes, num_warps=num_warps, name=name
        )
    )
    return tuple(triton.from_words({name: next(written) for name in pool}, pool) for pool in pools)
