"""Arguments: what every implementation of `append_tokens` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes


class Arguments(NamedTuple):
    """The arguments of `op.append_tokens`, which describes and checks them."""

    rings: Sequence[Planes]
    rows: Sequence[Planes]
    running: jax.Array | None
    projections: Planes | None
    call: CallIndices
    layer: jax.Array
    rate: int
