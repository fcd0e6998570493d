"""StepResult: what a call gave, read and in order, for the host to count and hand out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4_jax.step.draws import Logprobs
from dsv4_jax.step.serve_values import ServeOutput


class StepResult(NamedTuple):
    """What a call of n steps gave, in NumPy.

    Attributes:
      token_ids: i32[B, m], the drawn tokens of all steps in order; -1 after the last one.
      num_kept: as in `ServeOutput`.
      draft_token_ids: the same.
      num_drafts: the same; None without drafts.
      num_accepted: i32[B, n], how many of those were kept; None without drafts.
      logprobs: as in `ServeOutput`.
    """

    token_ids: np.ndarray
    num_kept: np.ndarray
    draft_token_ids: np.ndarray
    num_drafts: np.ndarray | None = None
    num_accepted: np.ndarray | None = None
    logprobs: Logprobs | None = None

    @classmethod
    def of(cls, output: ServeOutput) -> StepResult:
        """What the device gave, which is read here."""
        drawn, kept, drafts, checked = map(np.asarray, output.parts())
        if not output.draft_tokens:
            return cls(drawn, kept, drafts, logprobs=output.logprobs)
        is_drawn, num_steps = drawn >= 0, checked.shape[1]
        of_step = is_drawn.reshape(len(drawn), num_steps, -1).sum(axis=2)
        if num_steps > 1:
            drawn = np.take_along_axis(drawn, np.argsort(~is_drawn, axis=1, kind="stable"), axis=1)
        accepted = np.maximum(of_step - 1, 0)
        return cls(drawn, kept, drafts, checked, accepted, output.logprobs)
