"""What an implementation of `pick_experts` is called with."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Arguments(NamedTuple):
    """The checked arguments of `op.pick_experts`, in its order."""

    logits: jax.Array
    bias: jax.Array | None
    expert_ids: jax.Array | None
    picks: int
    scaling: float
    first: jax.Array | None
