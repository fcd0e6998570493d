"""Arguments: what every implementation of `sparse_attention` takes."""

from __future__ import annotations

from typing import NamedTuple

import jax

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
