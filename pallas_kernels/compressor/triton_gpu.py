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
    CallArrays,
    load_place,
    prepare_store,
    read_closing,
    store_place,
)
from pallas_kernels.compressor.triton_means import Channels, PoolCSA, PoolHCA, Pooling, Sources
from pallas_kernels.gpu import triton, triton_codecs

Ref = Any
_FINISH_WARPS = 4


def flush_csa(
    compressors: Sequence[Compressor], windows: Windows, *, tiling: Tiling | None = None
) -> tuple[Planes, ...]:
    """See `op.flush_csa`."""
    num_windows = windows.closing.shape[0]
    tiling = tiling or choose_csa(num_windows)
    # Fewer windows than tokens: those of a prompt, whose rows are in the call.
    eager = num_windows < windows.call.positions.shape[0]
    poolings = [PoolCSA(c.norm.dtype, windows.compression_ratio, eager) for c in compressors]
    if not tiling.apart:
        return _flush_windows(
            compressors, poolings, windows, num_warps=tiling.warps, name="flush_csa"
        )
    written: list[Planes] = []
    for compressor, pooling in zip(compressors, poolings, strict=True):
        # Compressors differ in lanes: alone, each has the warps that suit its own.
        num_warps = warps_apart(_all_channels(compressor.norm, compressor.codec).width)
        written += _flush_windows(
            [compressor], [pooling], windows, num_warps=num_warps, name="flush_csa"
        )
    return tuple(written)


def flush_hca(compressor: Compressor, windows: Windows, *, tiling: Tiling | None = None) -> Planes:
    """See `op.flush_hca`."""
    call, compression_ratio = windows.call, windows.compression_ratio
    num_windows, num_tokens = windows.closing.shape[0], call.positions.shape[0]
    tiling = tiling or choose_hca(num_windows, num_tokens)
    # No more than a window or a call has: what is loaded ahead has to lie in the call's rows.
    chunk = min(tiling.chunk, call.max_row_tokens, compression_ratio, num_tokens)
    pooling = PoolHCA(
        compressor.norm.dtype, compression_ratio, chunk, eager=num_windows < num_tokens
    )
    if tiling.channels:
        means, places = _pool_tiles(compressor, pooling, windows, tiling)
        return _finish_means(compressor, means, places, windows)
    (written,) = _flush_windows(
        [compressor], [pooling], windows, num_warps=tiling.warps, name="flush_hca"
    )
    return written


class _Operands(NamedTuple):
    """Arrays that a launch reads, and in it their refs.

    Attributes:
      call: where the call's tokens belong.
      frequencies: f32[R / 2]; None for a launch that only pools.
      sources: what the windows of each compressor are pooled from.
      norms: [C] of each; none for a launch that only pools.
    """

    call: CallArrays
    frequencies: Any
    sources: Sequence[Sources]
    norms: Sequence[Any]


def _operands(compressors: Sequence[Compressor], windows: Windows) -> _Operands:
    call = windows.call
    return _Operands(
        call=CallArrays(
            layer=windows.layer.reshape(1),
            closing=windows.closing,
            segment_ids=call.segment_ids,
            slots=call.slots,
            positions=call.positions,
            lengths=call.lengths,
            table=call.block_table,
        ),
        frequencies=windows.frequencies,
        sources=[Sources(compressor.state, compressor.rows) for compressor in compressors],
        norms=[compressor.norm for compressor in compressors],
    )


def _flush_windows(
    compressors: Sequence[Compressor],
    poolings: Sequence[Pooling],
    windows: Windows,
    *,
    num_warps: int,
    name: str,
) -> tuple[Planes, ...]:
    """Programs of whole windows, for each compressor."""

    def kernel(inputs: _Operands, pools: list[dict[str, Ref]]) -> None:
        # A row of the grid for each closing token, a column for each compressor.
        program, chosen = pl.program_id(0), pl.program_id(1)
        token = inputs.call.closing[program]  # -1 for no window
        for number, (compressor, pooling) in enumerate(zip(compressors, poolings, strict=True)):
            flush_window = functools.partial(
                _flush_window,
                pools[number],
                inputs,
                number,
                token,
                pooling=pooling,
                codec=compressor.codec,
                compression_ratio=windows.compression_ratio,
                eps=windows.eps,
            )
            # Each compressor has its own codec and dims, so each has its own code in the kernel.
            pl.when((chosen == number) & (token >= 0))(flush_window)

    written = triton.launch(
        kernel,
        grid=(windows.closing.shape[0], len(compressors)),
        inputs=_operands(compressors, windows),
        # Entries that no window closes keep their content: the pools are updated, not made.
        in_place=[triton.as_words(compressor.pool) for compressor in compressors],
        num_warps=num_warps,
        name=name,
    )
    return tuple(
        triton.from_words(words, compressor.pool)
        for words, compressor in zip(written, compressors, strict=True)
    )


def _flush_window(
    planes: dict[str, Ref],
    inputs: _Operands,
    number: int,
    token: jax.Array,
    *,
    pooling: Pooling,
    codec: Codec,
    compression_ratio: int,
    eps: float,
) -> None:
    """A window of the compressor of that number, into its pool.

    Loads wait for the token alone, but for those of the table and of windows cut by the call.
    """
    sources, norm = inputs.sources[number], inputs.norms[number]
    channels = _all_channels(norm, codec)
    # What the token alone says, before what the call says of it: loads, weights, then addresses.
    loaded = pooling.load(sources, token, channels)
    store = prepare_store(planes, codec, norm, inputs.frequencies, width=channels.width, eps=eps)
    # The block table is read last: it takes the position first, and only the store waits for it.
    closes = read_closing(inputs.call, token, compression_ratio)
    mean = pooling.finish(sources, closes, channels, loaded)  # f32[width]
    store(mean, closes.begin, closes.locate(planes))


def _pool_tiles(
    compressor: Compressor, pooling: Pooling, windows: Windows, tiling: Tiling
) -> tuple[jax.Array, jax.Array]:
    """The windows' means [n, C], by programs of `tiling.channels` channels each, and their places.

    The program of a window's first tile finds its place while others pool.
    """
    num_windows, norm = windows.closing.shape[0], compressor.norm
    (dim,), dtype = norm.shape, norm.dtype
    channels = math.gcd(tiling.channels, dim)  # so that tiles are whole

    def kernel(inputs: _Operands, outputs: tuple[Ref, Ref]) -> None:
        number, tile = pl.program_id(0), pl.program_id(1)
        [sources], (means, places) = inputs.sources, outputs
        token = inputs.call.closing[number]
        # A warp's lanes at least; those beyond the tile's channels are masked.
        width = max(32, pl.next_power_of_2(channels))
        own = Channels(tile * channels, channels, width)

        @pl.when(token >= 0)
        def _pool() -> None:
            # Loads that the token alone finds are on their way before its position is asked for.
            loaded = pooling.load(sources, token, own)
            closes = read_closing(inputs.call, token, windows.compression_ratio)
            mean = pooling.finish(sources, closes, own, loaded).astype(dtype)
            triton.store_row(means, (number,), mean, first=0, start=own.start, count=channels)

        @pl.when(tile == 0)
        def _place() -> None:
            closes = read_closing(inputs.call, jnp.maximum(token, 0), windows.compression_ratio)
            # For the second launch, which would else wait for position, table row and block one
            # after the other.
            place = closes.locate(compressor.pool)
            store_place(places, number, token >= 0, closes.begin, place)

    return triton.launch(
        kernel,
        grid=(num_windows, dim // channels),
        inputs=_operands([compressor], windows)._replace(frequencies=None, norms=[]),
        outputs=(
            jax.ShapeDtypeStruct((num_windows, dim), dtype),
            jax.ShapeDtypeStruct((num_windows, PLACE_FIELDS), jnp.int32),
        ),
        num_warps=tiling.pool_warps,
        name="flush_hca_pool",
    )


def _finish_means(
    compressor: Compressor, means: jax.Array, places: jax.Array, windows: Windows
) -> Planes:
    """Every load of a program is of its window's number alone: it waits for one, not for three.

    Without a window it finishes what happens to lie there, and stores nothing.
    """
    codec, eps = compressor.codec, windows.eps

    def kernel(inputs: tuple[Ref, Ref, Ref, Ref], planes: dict[str, Ref]) -> None:
        means, places, norm, frequencies = inputs
        number, channels = pl.program_id(0), _all_channels(norm, codec)
        # Written by the launch before, which has ended: one load, of a row that nobody else reads.
        mean = triton.load_row(means, (number,), **channels.columns).astype(jnp.float32)
        begin, place = load_place(places, number)
        store = prepare_store(planes, codec, norm, frequencies, width=channels.width, eps=eps)
        store(mean, begin, place)

    words = triton.launch(
        kernel,
        grid=(means.shape[0],),
        inputs=(means, places, compressor.norm, windows.frequencies),
        in_place=triton.as_words(compressor.pool),
        num_warps=_FINISH_WARPS,
        name="flush_hca",
    )
    return triton.from_words(words, compressor.pool)


def _all_channels(norm: Ref, codec: Codec) -> Channels:
    return Channels(0, norm.shape[0], triton_codecs.tile_width(codec, norm.shape[0]))
