"""How likely a draft has to be kept for checking it to save time.

Each further row of a step reads the experts that no other row has picked. A draft is worth that if
the tokens that it is expected to give take longer without it: at one request only likely drafts
are, and where a step reads all experts anyway nearly every one is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dsv4_jax.config import DSV4Config
from dsv4_jax.model.weight_sizes import walk_weights
from pallas_kernels.common.weights import weight_bytes

KEPT_TOGETHER = (0.82, 0.67, 0.55, 0.45, 0.37)
"""Chance that all of the first j drafts are kept, of mixed traffic as others measured it.

Source: dspark.md section 11. Later drafts are taken to fall by the last ratio.
"""
ROWS_PER_READ = 300
"""Rows that one more row's products take as long as, of reading what those of one row take.

FP8 products of 600 TFLOP/s beside reads of 4.2 TB/s, at two operations for each byte: an H200.
"""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a step reads, in bytes on all devices together.

    Attributes:
      fixed: whatever its rows pick.
      experts: of all routed experts of all layers.
      num_experts: E, of a layer.
      picks: k, of a row.
    """

    fixed: float
    experts: float
    num_experts: int
    picks: int

    @classmethod
    def of(cls, config: DSV4Config, params: Any) -> StepCost:
        """Of parameters, or their shapes.

        The draft reads as much however many of its guesses are checked; its experts are left out.
        """
        fixed = experts = 0
        for path, weight in walk_weights(params):
            if path.endswith((".ffn.w1", ".ffn.w2", ".ffn.w3")):
                experts += 0 if path.startswith("mtp.") else weight_bytes(weight)
            elif path != "embed":
                fixed += weight_bytes(weight)
        return cls(
            fixed=fixed,
            experts=experts,
            num_experts=config.num_routed_experts,
            picks=config.num_experts_per_token,
        )

    def at(self, rows: float) -> float:
        """Bytes, or what products of so many rows take as long as, whichever is more."""
        missed = (1 - self.picks / self.num_experts) ** rows
        read = self.fixed + self.experts * (1 - missed)
        of_one = self.fixed + self.experts * self.picks / self.num_experts
        return max(read, of_one * rows / ROWS_PER_READ)


def least_survival(cost: StepCost, requests: int, draft_tokens: int) -> float:
    """The least chance of being kept at which a draft is worth its row.

    Of the depths 0 .. k, the one of most tokens in a time is found with `KEPT_TOGETHER`; there, one
    more row costs a time, in which so many tokens come without it.

    Args:
      cost: of a step.
      requests: that decode in it, at least 1.
      draft_tokens: k, the most drafts of a request.

    Returns:
      0 to 1.
    """
    chances = list(KEPT_TOGETHER)
    while len(chances) < draft_tokens:
        chances.append(chances[-1] * KEPT_TOGETHER[-1] / KEPT_TOGETHER[-2])

    def pace(depth: int) -> float:
        """Tokens of a request for each byte of its steps."""
        return (1 + sum(chances[:depth])) / cost.at(requests * (1 + depth))

    best = max(range(draft_tokens + 1), key=pace)
    rows = requests * (1 + best)
    added = cost.at(rows + 1) - cost.at(rows)
    return min(1.0, added * requests * pace(best))
