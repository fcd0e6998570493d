"""How long a call takes by arithmetic, before one of its kind was measured.

It is a first guess, in the numbers of an H200, and good to some 10 % there for V4-Flash in the
formats of the release. Elsewhere its scale is wrong; what matters more is how a call's time grows
with its tokens and their context.
"""

from __future__ import annotations

from dsv4_jax.step.draft_worth import BYTES_PER_S, HIDDEN_ROWS, LAYER_S, StepCost

ROWS_PER_READ = 58
"""Further rows of a long call that take as long as reading the weights that one row takes.

V4-Flash with 192 experts reads 8,192 tokens in 405 ms (docs/benchmarks/prefill.md).
"""
REACH_S = 5e-12
"""Seconds of a token for each token before it, in each layer: index scores and HCA attention.

A prompt of 32,768 tokens in calls of 8,192 takes 165 ms more than four of 8,192.
"""


def base_seconds(cost: StepCost, tokens: int, rows: int) -> float:
    """Time of a call of one step whose tokens have nothing before them.

    Args:
      cost: what a device reads and multiplies in a step.
      tokens: those that pick experts, on all data shards together.
      rows: of the call's shape on a data shard; those without a token are multiplied too.
    """
    picked = cost.picks / cost.num_experts
    read = cost.fixed + cost.experts * (1 - (1 - picked) ** tokens)
    products = cost.fixed * max(0, rows - HIDDEN_ROWS)
    products += cost.experts * picked * max(0, tokens - HIDDEN_ROWS)
    return LAYER_S * cost.num_layers + (read + products / ROWS_PER_READ) / BYTES_PER_S


def reach_seconds(cost: StepCost, reach: float) -> float:
    """What the tokens before them add to that.

    Args:
      cost: as in `base_seconds`.
      reach: the call's tokens, each times the tokens before it.
    """
    return REACH_S * cost.num_layers * reach
