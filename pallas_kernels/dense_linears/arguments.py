"""What an implementation of `dense_linears` is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax


class Arguments(NamedTuple):
    """The checked arguments of `op.dense_linears`, in its order."""

    x: jax.Array
    weights: Sequence[jax.Array]
    biases: Sequence[jax.Array | None]
    positions: jax.Array
