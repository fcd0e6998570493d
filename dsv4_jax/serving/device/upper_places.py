"""Which tokens of a step its upper layers run, as `ServeInput.upper` has them."""

from __future__ import annotations

import numpy as np

from dsv4_jax.serving.schedule.scheduler import StepPlan


def upper_places(plan: StepPlan, places: np.ndarray, shards: int) -> np.ndarray | None:
    """i32[shards * U], of each data shard places within its own part of the step, then -1.

    None where all tokens are run by all layers.

    Args:
      plan: the step.
      places: i[n], of the tokens of its rows in the whole step, ascending.
      shards: data shards.
    """
    if plan.upper_size is None:
        return None
    awake = places[np.repeat(~plan.rows.rests, plan.rows.num_tokens + plan.rows.num_drafts)]
    shard, own = np.divmod(awake, plan.size)
    found = np.full((shards, plan.upper_size), -1, np.int32)
    found[shard, np.arange(len(awake)) - np.searchsorted(shard, shard)] = own
    return found.reshape(-1)
