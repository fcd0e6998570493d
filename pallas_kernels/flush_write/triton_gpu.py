"""Triton kernels of `flush_csa` and `flush_hca`: pool, norm, rotate, quantise and store in place.

One program takes one closing token and one compressor, a channel per lane, so that a window's
tokens are folded in their order wherever the call was cut. CSA reads its 2M tokens from the call
or, before it, from the state; HCA goes on from the running pool, a chunk of tokens at a time with
their loads in flight together. A program without a window ends after one load.

Bytes: every value and score of the call once (an element belongs to one window), the entries, and
no intermediate result. What bounds them is memory at thousands of windows, a chain of loads,
exponentials and reductions at a few.
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
from pallas_kernels.formats import Codec, Planes

Ref = Any
_CSA_WARPS = 4
_HCA_WARPS = 8
_HCA_CHUNK = 16


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
        closes, chosen = _Closing(call_refs, rate), pl.program_id(1)
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
            )
            pl.when((chosen == number) & closes.is_one)(compress)

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
    chunk = min(_HCA_CHUNK, max_count, rate)

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        call_refs, arrays = inputs[: len(call)], inputs[len(call) :]
        planes = dict(zip(pool, stored, strict=True))
        closes = _Closing(call_refs, rate)
        compress = functools.partial(
            _compress_hca, planes, arrays, closes, codec=codec, eps=eps, chunk=chunk
        )
        pl.when(closes.is_one)(compress)

    (written,) = _launch(
        kernel,
        (closing.shape[0],),
        [*call, running, rows["values"], rows["scores"], norm, frequencies],
        [pool],
        num_warps=_HCA_WARPS,
        name="flush_hca",
    )
    return written


class _Closing:
    """The token with which a program's window ends; if there `is_one`, else only index 0."""

    def __init__(self, call_refs: Sequence[Ref], rate: int) -> None:
        layer, closing, request_ids, slots, positions, lengths, self.table = call_refs
        token = closing[pl.program_id(0)]
        self.is_one = token >= 0
        self.token = jnp.maximum(token, 0)
        self.layer = layer[0]
        self.request = request_ids[self.token]
        self.slot = jnp.maximum(slots[self.token], 0)
        self.position = positions[self.token]
        self.length = lengths[self.token]
        self.rate = rate

    def locate(self, entries_per_block: int) -> tuple[jax.Array, jax.Array]:
        """The entry's block, -1 where there is none, and its offset in it."""
        entry = self.position // self.rate
        logical = entry // entries_per_block
        inside = (self.request >= 0) & (logical < self.table.shape[1])
        block = self.table[jnp.maximum(self.request, 0), jnp.where(inside, logical, 0)]
        return jnp.where(inside, block, -1), entry % entries_per_block


def _compress_csa(
    planes: dict[str, Ref],
    arrays: Sequence[Ref],
    frequencies: Ref,
    closes: _Closing,
    *,
    codec: Codec,
    eps: float,
) -> None:
    """The b-stream of the window before, then the a-stream of the own one: 2M tokens."""
    *sources, norm = arrays
    channels, rate = norm.shape[0], closes.rate
    width = entry_tile.tile_width(codec, channels)
    load = functools.partial(triton.load_row, count=channels, width=width)
    tokens = []
    for back in range(2 * rate - 1, -1, -1):
        position = closes.position - back
        in_call = position >= closes.length
        kept = (closes.layer, closes.slot, jnp.maximum(position, 0) % (2 * rate))
        new = (jnp.maximum(closes.token - back, 0),)
        first = 0 if back >= rate else channels
        value, score = (
            window.select(
                in_call,
                load(new_ref, new, start=first, live=in_call),
                load(old_ref, kept, start=first, live=~in_call),
            )
            for old_ref, new_ref in zip(sources[:2], sources[2:], strict=True)
        )
        tokens.append((value, score, position >= 0))
    pooled = window.empty_pool(width)
    for token in tokens:
        pooled = window.fold(pooled, *token)
    _store(planes, codec, pooled, norm, frequencies, closes, eps=eps)


def _compress_hca(
    planes: dict[str, Ref],
    arrays: Sequence[Ref],
    closes: _Closing,
    *,
    codec: Codec,
    eps: float,
    chunk: int,
) -> None:
    """What the running pool holds of the window, then its tokens of this call."""
    running, values, scores, norm, frequencies = arrays
    width = entry_tile.tile_width(codec, norm.shape[0])
    begin = closes.position - (closes.rate - 1)
    first = jnp.maximum(begin, closes.length)
    at = (closes.layer, closes.slot)
    pooled = window.fold_tokens(
        window.continue_pool(running, at, begin < closes.length, width=width),
        (values, scores),
        start=closes.token - (closes.position - first),
        count=closes.position - first + 1,
        chunk=chunk,
    )
    _store(planes, codec, pooled, norm, frequencies, closes, eps=eps)


def _store(
    planes: dict[str, Ref],
    codec: Codec,
    pooled: window.Pool,
    norm: Ref,
    frequencies: Ref,
    closes: _Closing,
    *,
    eps: float,
) -> None:
    """Finishes a pooled window and writes it where the block table says, if anywhere."""
    begin = closes.position - (closes.rate - 1)
    entry = window.finish_entry(pooled, norm, frequencies, begin, eps=eps)
    rope_dim = planes["rope"].shape[-1] if "rope" in planes else 0
    encoded = entry_tile.encode(codec, entry, dim=norm.shape[0], rope_dim=rope_dim)
    block, offset = closes.locate(next(iter(planes.values())).shape[2])
    index = (closes.layer, block, offset)
    pl.when(block >= 0)(functools.partial(entry_tile.store_entry, planes, index, encoded))


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
