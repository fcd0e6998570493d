"""CallLoad: what the time of a step with prompts depends on."""

from __future__ import annotations

import dataclasses

import numpy as np

from dsv4_jax.serving.schedule.scheduler import StepPlan


@dataclasses.dataclass(frozen=True)
class CallLoad:
    """What the time of a step with prompts depends on.

    Attributes:
      size: tokens of its shape, on a data shard.
      tokens: those of its requests, on all data shards.
      reach: these, each times the tokens before it.
      upper: those that its upper layers run, as `size` has them, where some rest; None is all.
    """

    size: int
    tokens: int
    reach: float
    upper: int | None = None

    @classmethod
    def of(cls, plan: StepPlan, lengths: np.ndarray) -> CallLoad:
        """Of a planned step, whose rows hold so many tokens before it: i32[n]."""
        counts = (plan.rows.num_tokens + plan.rows.num_drafts).astype(np.float64)
        reach = float(counts @ (lengths + counts / 2))
        return cls(plan.size, int(counts.sum()), reach, plan.upper_size)
