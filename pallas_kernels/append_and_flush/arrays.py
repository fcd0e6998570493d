"""What `append_and_flush` gives back."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.common.codecs import Planes


class Appended(NamedTuple):
    """What `append_and_flush` has made and updated.

    Attributes:
      queries: [T, H, C], normed and rotated.
      rows: planes [T, ...], the tokens' window entries, which are in the ring too.
      ring: the planes of the window, updated.
      states: the state of each compressor, updated.
      pools: the pool of each compressor, updated.
      index_queries: [T, IH, IC], rotated and rounded; None where there were none.
    """

    queries: jax.Array
    rows: Planes
    ring: Planes
    states: tuple[Planes | jax.Array, ...]
    pools: tuple[Planes, ...]
    index_queries: jax.Array | None
