"""What an implementation of `joined_linears` is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from pallas_kernels.common.weights import Weight


class Arguments(NamedTuple):
    """The checked arguments of `op.joined_linears`, in its order."""

    x: jax.Array
    weights: Sequence[Weight]
    biases: Sequence[jax.Array | None]
    positions: jax.Array
    dtypes: Sequence[DTypeLike]
