"""What `append_and_flush` takes of a compressor, and what it gives back."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.common.codecs import Codec, Planes


class Compressor(NamedTuple):
    """One compressor of a layer: what it keeps, what the call's tokens give it, where entries go.

    Attributes:
      state: CSA: `values` and `scores`, f32[L, NS, 2 * M, 2 * C], token p in row p % (2 * M).
        HCA: f32[L, NS, 3, C], the running pool of the open window.
      rows: `values` and `scores`, f32[T, 2 * C] or f32[T, C], position bias added.
      norm: [C], weight of the entry's norm, in the dtype of activations.
      pool: planes [L, NB, EB, ...] of the codec.
      codec: how entries are stored.
    """

    state: Planes | jax.Array
    rows: Planes
    norm: jax.Array
    pool: Planes
    codec: Codec


class Appended(NamedTuple):
    """What `append_and_flush` has made and updated.

    Attributes:
      queries: [T, H, C], normed and rotated.
      rows: planes [T, ...], the tokens' window entries, which are in the ring too.
      ring: the updated window.
      states: of each compressor, updated.
      pools: of each compressor, updated.
      index_queries: f32[T, IH, IC], rotated and rounded; None where there were none.
    """

    queries: jax.Array
    rows: Planes
    ring: Planes
    states: tuple[Planes | jax.Array, ...]
    pools: tuple[Planes, ...]
    index_queries: jax.Array | None
