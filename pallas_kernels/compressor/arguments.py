"""Arguments: what every implementation of the flushes takes beside its compressors."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes


class Windows(NamedTuple):
    """The windows that a call closes, as `flush_csa` and `flush_hca` compress them.

    Attributes:
      call: where the call's tokens belong.
      frequencies: f32[R / 2], radians per position.
      closing: i32[n], tokens of the call that close a window, in any order; -1 is none.
      layer: i32[], index into states and pools.
      rate: M, tokens per window.
      eps: floor of the norms.
    """

    call: CallIndices
    frequencies: jax.Array
    closing: jax.Array
    layer: jax.Array
    rate: int
    eps: float


class Entries(NamedTuple):
    """The arguments of `op.flush_write`, which describes and checks them."""

    pool: Planes
    rows: Planes
    block_table: jax.Array
    segment_ids: jax.Array
    numbers: jax.Array
    layer: jax.Array
