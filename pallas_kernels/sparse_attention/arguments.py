"""What every implementation of `sparse_attention` takes, and what one of some keys gives."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes


class Arguments(NamedTuple):
    """The arguments of `op.sparse_attention`, which describes and checks them."""

    queries: jax.Array
    sink: jax.Array
    ring: LayerPlanes
    rows: Planes
    pool: LayerPlanes | None
    selected: jax.Array | None
    call: CallIndices
    scale: float
    frequencies: jax.Array | None = None
    query_eps: float | None = None


class AttentionPart(NamedTuple):
    """Attention to some of the keys, before sink and division, or such parts of all keys, stacked.

    Attributes:
      sums: f32[..., T, H, C], values weighted by exponentials relative to the largest logit.
      statistics: f32[..., T, 2, H], the largest logit times log2(e), `call_shapes.FLOOR` without
        keys, and the sum of the weights.
    """

    sums: jax.Array
    statistics: jax.Array


class JoinArguments(NamedTuple):
    """The arguments of `parts.join_parts`, which describes and checks them."""

    parts: AttentionPart
    sink: jax.Array
    positions: jax.Array
    frequencies: jax.Array | None
    dtype: DTypeLike
