"""How likely a draft has to be kept for checking it to save time.

Each further row of a step reads the experts that no other row has picked. A draft is worth that if
the tokens that it is expected to give take longer without it: at one request only likely drafts
are, and where a step reads all experts anyway nearly every one is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.model.weight_sizes import walk_weights
from pallas_kernels.common.weights import weight_bytes

KEPT_TOGETHER = (0.82, 0.67, 0.55, 0.45, 0.37)
"""Chance that all of the first j drafts are kept, of mixed traffic as others measured it.

Source: dspark.md section 11. Later drafts are taken to fall by the last ratio.
"""
BYTES_PER_S = 4.2e12
"""What an H200 reads in a second."""
LAYER_S = 76e-6
"""Seconds of a layer beside its reads, which do not overlap at few rows: a round of V4-Flash with
one request takes 3.5 ms more than its bytes do, on an H200."""
NEW_PICKS = 0.7
"""Of the experts that rows would add if they picked independently, the share that they do add.

Six rows of V4-Flash with random weights: 25.1 experts of a layer in place of 33.3. Neighbours of a
text that was held out, by the model that comes with the package: 0.76.
"""
HIDDEN_ROWS = 64
"""Rows whose products end before the weights are read."""
ROWS_PER_READ = 35
"""Further rows whose products take as long as reading what those of one row take: an H200."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a step reads and multiplies; bytes are of one device.

    Attributes:
      fixed: bytes read whatever its rows pick.
      experts: bytes of all routed experts of all layers.
      num_experts: E, of a layer.
      picks: k, of a row.
      num_layers: of trunk and draft.
    """

    fixed: float
    experts: float
    num_experts: int
    picks: int
    num_layers: int

    @classmethod
    def of(cls, config: DSV4Config, params: Any, *, num_devices: int = 1) -> StepCost:
        """Of parameters, or their shapes, that are dealt over so many devices.

        The draft reads as much however many of its guesses are checked; its experts are left out.
        """
        fixed = experts = 0
        for path, weight in walk_weights(params):
            if path.endswith((".ffn.w1", ".ffn.w2", ".ffn.w3")):
                experts += 0 if path.startswith("mtp.") else weight_bytes(weight)
            elif path != "embed":
                fixed += weight_bytes(weight)
        return cls(
            fixed=fixed / num_devices,
            experts=experts / num_devices,
            num_experts=config.num_routed_experts,
            picks=config.num_experts_per_token,
            num_layers=config.num_layers + len(draft_layers(config)),
        )

    def seconds(self, checked: float, rows: float) -> float:
        """Time of a step whose shape has so many rows, of which so many are checked.

        The others are padding, which picks no experts and is multiplied with all other weights.
        """
        picked = self.picks / self.num_experts
        new = 1 - (1 - picked) ** max(0.0, checked - 1)
        read = self.experts * (picked + NEW_PICKS * (1 - picked) * new)
        products = self.fixed * max(0.0, rows - HIDDEN_ROWS)
        products += self.experts * picked * max(0.0, checked - HIDDEN_ROWS)
        moved = self.fixed + read + products / ROWS_PER_READ
        return LAYER_S * self.num_layers + moved / BYTES_PER_S


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
    rows = requests * (1 + draft_tokens)

    def pace(depth: int) -> float:
        """Tokens of a request in a second."""
        return (1 + sum(chances[:depth])) / cost.seconds(requests * (1 + depth), rows)

    best = max(range(draft_tokens + 1), key=pace)
    checked = requests * (1 + best)
    added = cost.seconds(checked + 1, rows) - cost.seconds(checked, rows)
    return min(1.0, added * requests * pace(best))
