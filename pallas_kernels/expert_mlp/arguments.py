"""What an implementation of `expert_mlp` is called with."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.common.weights import Weight


class Arguments(NamedTuple):
    """The checked arguments of `op.expert_mlp`, in its order."""

    x: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array
    w1: Weight
    w3: Weight
    w2: Weight
    limit: float
    shared: tuple[Weight, Weight, Weight] | None = None
    picked_among: int | None = None
