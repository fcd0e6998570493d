"""Arguments: what every implementation of `hyper_connections` takes."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Arguments(NamedTuple):
    """The arguments of `op.hyper_connections`, which describes and checks them."""

    products: jax.Array
    scale: jax.Array
    base: jax.Array
    streams: jax.Array
    norm: jax.Array
    iters: int
    eps: float
    norm_eps: float
