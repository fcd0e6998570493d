"""Where a window's mean comes from, the call, the state or both, inside a Triton kernel.

Each class first loads what the token with which the window ends is enough to find, so that a
program need not wait for what the call says of that token; then it finishes the mean, which
`triton_pool.py` pools.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.compressor import triton_pool
from pallas_kernels.compressor.triton_closing import Closing
from pallas_kernels.gpu import triton

Loaded = Any
_CARRIED_CHUNK = 8  # tokens; one window a request at most goes on from an earlier call


class Channels(NamedTuple):
    """A tile of a window's channels: `size` from `start` on, in `width` lanes."""

    start: jax.Array | int
    size: int
    width: int

    @property
    def columns(self) -> dict[str, Any]:
        """As `triton.load_row` takes them."""
        return {"start": self.start, "count": self.size, "width": self.width}


class Sources(NamedTuple):
    """Where the tokens of a compressor's windows lie, and in a kernel their refs.

    Attributes:
      state: as of `Compressor`: values and scores of CSA, the running pool of HCA.
      rows: the call's values and scores.
    """

    state: Any
    rows: Any


class Pooling(Protocol):
    """Finds means."""

    def load(self, sources: Sources, token: jax.Array, channels: Channels) -> Loaded:
        """Starts loads, given the closing token's index in the call, i32[]; a tree of arrays."""
        ...

    def finish(
        self, sources: Sources, closes: Closing, channels: Channels, loaded: Loaded
    ) -> jax.Array:
        """f32[width], the mean, rounded to the dtype of activations."""
        ...


class PoolCSA(NamedTuple):
    """The b-stream of the window before, then the a-stream of the own one: 2M tokens.

    Attributes:
      dtype: of activations.
      compression_ratio: M.
      eager: whether most windows lie in the call; then its rows are loaded before that is known.
    """

    dtype: DTypeLike
    compression_ratio: int
    eager: bool

    def load(self, sources: Sources, token: jax.Array, channels: Channels) -> Loaded:
        """See `Pooling`."""
        num_tokens, row_width = sources.rows["values"].shape  # T, 2 * C
        # A call of fewer tokens has no such window whole, and too few rows to load.
        if not self.eager or num_tokens < 2 * self.compression_ratio:
            return None
        own, half = token - (self.compression_ratio - 1), row_width // 2  # the window's first row
        load = functools.partial(
            triton_pool.load_tokens, sources.rows, number=self.compression_ratio
        )
        # The b-stream has the first half of a row's columns, the a-stream the second.
        b_stream = load(own - self.compression_ratio, **channels.columns)  # M tokens
        a_stream = load(own, **channels._replace(start=channels.start + half).columns)
        return [*b_stream, *a_stream]

    def finish(
        self, sources: Sources, closes: Closing, channels: Channels, loaded: Loaded
    ) -> jax.Array:
        """See `Pooling`."""
        if loaded is None:
            pooled = _pool_merged(sources, closes, channels)
        else:
            all_in_call = closes.position - (2 * closes.compression_ratio - 1) >= closes.length
            # What was loaded ahead is the window, or is dropped for one that is cut by the call.
            pooled = jax.lax.cond(
                all_in_call,
                triton_pool.pool_tokens,
                lambda _: _pool_merged(sources, closes, channels),
                loaded,
            )
        return triton_pool.mean(pooled, channels.size, self.dtype)


class PoolHCA(NamedTuple):
    """What the running pool holds of the window, then its tokens of this call.

    Attributes:
      dtype: of activations.
      compression_ratio: M.
      chunk: tokens whose loads are in flight.
      eager: as for CSA, of a window's first chunk.
    """

    dtype: DTypeLike
    compression_ratio: int
    chunk: int
    eager: bool

    def load(self, sources: Sources, token: jax.Array, channels: Channels) -> Loaded:
        """See `Pooling`."""
        if not self.eager:
            return None
        first = token - (self.compression_ratio - 1)
        # The window's first tokens; the next chunk is asked for while this one is folded.
        return triton_pool.load_tokens(sources.rows, first, self.chunk, **channels.columns)

    def finish(
        self, sources: Sources, closes: Closing, channels: Channels, loaded: Loaded
    ) -> jax.Array:
        """See `Pooling`."""
        begin = closes.begin

        def fold_window(loaded: Loaded) -> triton_pool.Pool:
            return triton_pool.fold_window(
                loaded,
                sources.rows,
                first=closes.token - (closes.compression_ratio - 1),
                num_tokens=closes.compression_ratio,
                **channels.columns,
            )

        def continue_pool(_: Loaded) -> triton_pool.Pool:
            # Tokens before the call are in the running pool already.
            first = jnp.maximum(begin, closes.length)
            at, carried = (closes.layer, closes.slot), begin < closes.length
            return triton_pool.fold_tokens(
                triton_pool.continue_pool(sources.state, at, carried, **channels.columns),
                sources.rows,
                first=closes.token - (closes.position - first),
                num_tokens=closes.position - first + 1,
                chunk=min(self.chunk, _CARRIED_CHUNK) if self.eager else self.chunk,
                start=channels.start,
                count=channels.size,
            )

        if loaded is None:
            pooled = continue_pool(None)
        else:
            pooled = jax.lax.cond(begin >= closes.length, fold_window, continue_pool, loaded)
        return triton_pool.mean(pooled, channels.size, self.dtype)


def _csa_places(
    row_width: int, closes: Closing, channels: Channels
) -> list[tuple[tuple[jax.Array], tuple[jax.Array, ...], jax.Array | int]]:
    """Of each token: its row of the call, its row of the state, its first column in both."""
    compression_ratio, places = closes.compression_ratio, []
    for back in range(2 * compression_ratio - 1, -1, -1):
        # Any row where the token is of an earlier call: its load is masked.
        row = (jnp.maximum(closes.token - back, 0),)
        # The state keeps the last 2M tokens, each in the row of its position.
        kept = jnp.maximum(closes.position - back, 0) % (2 * compression_ratio)
        start = channels.start + (0 if back >= compression_ratio else row_width // 2)
        places.append((row, (closes.layer, closes.slot, kept), start))
    return places


def _pool_merged(sources: Sources, closes: Closing, channels: Channels) -> triton_pool.Pool:
    """Pools 2M tokens, of the state where they came before the call; the first window has M."""
    load = functools.partial(triton.load_row, count=channels.size, width=channels.width)
    row_width, tokens = sources.rows["values"].shape[1], []
    for number, (row, kept, start) in enumerate(_csa_places(row_width, closes, channels)):
        in_call = closes.position - (2 * closes.compression_ratio - 1) + number >= closes.length
        tokens.append(
            [
                triton_pool.select(
                    in_call,
                    # Both are asked for, and one of them is masked: no load waits for a branch.
                    load(sources.rows[name], row, start=start, live=in_call),
                    load(sources.state[name], kept, start=start, live=~in_call),
                )
                for name in triton_pool.TOKEN
            ]
        )
    # A request's first window has none before it: those M tokens weigh nothing.
    return triton_pool.pool_overlapping(tokens, closes.position >= closes.compression_ratio)
