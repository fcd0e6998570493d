"""Arguments: what every implementation of `append_and_flush` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Codec
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.common.norm_rope import NormRope
from pallas_kernels.compressor.arrays import Compressor


class Arguments(NamedTuple):
    """The arguments of `op.append_and_flush`, which describes and checks them."""

    queries: jax.Array
    kv: jax.Array
    ring: LayerPlanes
    compressors: Sequence[Compressor]
    call: CallIndices
    norm_rope: NormRope
    rate: int
    index_queries: jax.Array | None
    index_codec: Codec | None
