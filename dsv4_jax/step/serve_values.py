"""What the engine's step is given, and what it gives back."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dsv4_jax.cache.filled import filled
from dsv4_jax.cache.snapshots import SnapshotPlan
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.step.draws import DrawnCounts, Logprobs, TokenMasks
from dsv4_jax.step.sampling import MAX_LOGPROBS, Sampling
from pallas_kernels.common.addressing import drop_absent

LAST_DRAWN = -1
"""In the place of a token id: the last token that the step before drew for this row."""
FIRST_DRAFT = -2
"""In the place of a token id: the step before's first guess for this row; -3 is the second."""


@flax.struct.dataclass(kw_only=True)
class DrawInput:
    """What the draws of a plain step are given beside its logits; fields are as in `ServeInput`."""

    sampling: Sampling
    counts: DrawnCounts | None = None
    masks: TokenMasks | None = None


@flax.struct.dataclass(kw_only=True)
class ServeInput:
    """The whole input of `serve_step`.

    Attributes:
      step_input: the tokens. With the output of the step before, `LAST_DRAWN`, `FIRST_DRAFT` and
        what is below stand for tokens that the host has not read yet.
      num_checked: i32[B], a row's last tokens after which one is drawn: 1 and its drafts; at most
        draft_tokens + 1.
      next_token_ids: i32[B], the token after a row's last one where it is known, of a prompt that
        goes on; -1 where the drawn one is next.
      sampling: settings of each row.
      snapshots: boundaries to keep.
      counts: what rows have drawn before, for their penalties, as far as the host has read it:
        `count_last` adds what the step before drew. None is nothing.
      masks: which tokens rows may draw, n at least what the step draws of a row; None is all.
      num_steps: i32[B], steps that a row makes in a call of several (`decode_steps.py`); None
        elsewhere.
      least_survival: f32[B], of DSpark stages: drafts that the step before guessed are checked as
        far as the chance that all of them are kept is at least this; None, or 0, checks all.
      upper: i32[U], places in T of the tokens that `upper_layers` run too, ascending, then -1: all
        tokens of the rows that draw, and of the others all or none; None is all tokens.
    """

    step_input: StepInput
    num_checked: jax.Array
    next_token_ids: jax.Array
    sampling: Sampling
    snapshots: SnapshotPlan
    counts: DrawnCounts | None = None
    masks: TokenMasks | None = None
    num_steps: jax.Array | None = None
    least_survival: jax.Array | None = None
    upper: jax.Array | None = None

    @property
    def draws(self) -> DrawInput:
        """The part of it that the draws of a plain step are given."""
        return DrawInput(sampling=self.sampling, counts=self.counts, masks=self.masks)


@flax.struct.dataclass(kw_only=True)
class ServeOutput:
    """What a call of n steps gives back to the host; most calls are of one.

    Attributes:
      columns: i32[B, n * (k + 2) + k + 1], what `parts` shows, side by side: one array
        goes to the host faster than four.
      logprobs: of the drawn tokens, [B, k + 1]; None where they were left on the device. Calls of
        several steps have none, and leave what was there.
      confidence: f32[B, k], of DSpark drafts the logit of the chance that each is kept if those
        before it are; None of others.
      draft_tokens: k.
    """

    columns: jax.Array
    logprobs: Logprobs | None
    confidence: jax.Array | None = None
    draft_tokens: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(
        cls,
        token_ids: jax.Array,
        num_kept: jax.Array,
        draft_token_ids: jax.Array,
        logprobs: Logprobs | None,
        *,
        last: ServeOutput | None = None,
        num_drafts: jax.Array | None = None,
        confidence: jax.Array | None = None,
    ) -> ServeOutput:
        """Fields as the properties have them, widened to the steps of `last`, whose place it takes.

        `num_drafts` of no step are zeros.
        """
        draft_tokens = draft_token_ids.shape[1]
        num_steps = token_ids.shape[1] // (draft_tokens + 1)
        if num_drafts is None:
            num_drafts = jnp.zeros((len(num_kept), num_steps), jnp.int32)
        if last is not None and (spare := last.num_drafts.shape[1] - num_steps):
            token_ids = jnp.pad(
                token_ids, ((0, 0), (0, spare * (draft_tokens + 1))), constant_values=-1
            )
            num_drafts = jnp.pad(num_drafts, ((0, 0), (0, spare)))
        columns = jnp.concatenate([token_ids, num_kept[:, None], draft_token_ids, num_drafts], 1)
        return cls(
            columns=columns, logprobs=logprobs, confidence=confidence, draft_tokens=draft_tokens
        )

    @classmethod
    def empty(
        cls,
        num_rows: int,
        draft_tokens: int,
        vocab_size: int,
        *,
        num_steps: int = 1,
        has_confidence: bool = False,
    ) -> ServeOutput:
        """Of no step: what the first one is given as that of the step before.

        Args:
          num_rows: B.
          draft_tokens: k.
          vocab_size: of the model.
          num_steps: n, the most that a call makes.
          has_confidence: the drafts are those of DSpark stages.
        """
        drafts, width = (num_rows, draft_tokens), (num_rows, draft_tokens + 1)
        shape = (*width, min(MAX_LOGPROBS, vocab_size))
        num_columns = num_steps * (draft_tokens + 2) + draft_tokens + 1
        return cls(
            columns=filled((num_rows, num_columns), 0, jnp.int32),
            logprobs=Logprobs(
                drawn=filled(width, 0, jnp.float32),
                token_ids=filled(shape, 0, jnp.int32),
                top=filled(shape, 0, jnp.float32),
            ),
            confidence=filled(drafts, 0, jnp.float32) if has_confidence else None,
            draft_tokens=draft_tokens,
        )

    def parts(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The four properties below, in order."""
        num_drafts, width = self.draft_tokens, self.columns.shape[1]
        num_steps = (width - num_drafts - 1) // (num_drafts + 2)
        end = num_steps * (num_drafts + 1)
        return (
            self.columns[:, :end],
            self.columns[:, end],
            self.columns[:, end + 1 : end + 1 + num_drafts],
            self.columns[:, end + 1 + num_drafts :],
        )

    @property
    def token_ids(self) -> jax.Array:
        """i32[B, n * (k + 1)], what each step drew in order, with -1 up to k + 1 tokens."""
        return self.parts()[0]

    @property
    def num_kept(self) -> jax.Array:
        """i32[B], tokens of the call that stay in the cache."""
        return self.parts()[1]

    @property
    def draft_token_ids(self) -> jax.Array:
        """i32[B, k], guesses at what follows the last drawn token."""
        return self.parts()[2]

    @property
    def num_drafts(self) -> jax.Array:
        """i32[B, n], drafts that each step checked."""
        return self.parts()[3]


def fill_in(step_input: StepInput, last: ServeOutput | None) -> StepInput:
    """The same call, with the tokens of the step before where it names them.

    Args:
      step_input: the call; its rows are those of the step before.
      last: what that drew; None changes nothing.
    """
    if last is None:
        return step_input
    order = jnp.arange(last.token_ids.shape[1], dtype=jnp.int32)
    latest = jnp.max(jnp.where(last.token_ids >= 0, order, 0), axis=1, keepdims=True)
    drawn = jnp.take_along_axis(last.token_ids, latest, axis=1)
    # Column j is what stands for token id -1 - j.
    given = jnp.maximum(jnp.concatenate([drawn, last.draft_token_ids], axis=1), 0)
    row = jnp.clip(step_input.request_ids, 0, given.shape[0] - 1)
    column = jnp.clip(-1 - step_input.token_ids, 0, given.shape[1] - 1)
    token_ids = jnp.where(step_input.token_ids < 0, given[row, column], step_input.token_ids)
    return dataclasses.replace(step_input, token_ids=token_ids)


def fed_rows(step_input: StepInput) -> jax.Array:
    """bool[B], rows of which `LAST_DRAWN` stands for the last token."""
    row, num_rows = step_input.request_ids, step_input.request_slots.shape[0]
    is_last = (step_input.token_ids == LAST_DRAWN) & (row >= 0)
    fed = drop_absent(row, num_rows, is_there=is_last)
    return jnp.zeros(num_rows, bool).at[fed].set(True, mode="drop")


def count_last(
    counts: DrawnCounts | None, is_fed: jax.Array, last: ServeOutput | None
) -> DrawnCounts | None:
    """Counts what the step before drew of rows whose tokens the host has not read.

    Args:
      counts: what rows had drawn before that step; None stays None.
      is_fed: bool[B], such rows, of `fed_rows`.
      last: what the step before drew, of the same rows; None is nothing.
    """
    if counts is None or last is None:
        return counts
    drawn = last.token_ids
    num_rows, width = drawn.shape
    own = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32)[:, None], drawn.shape)
    rows = jnp.where(is_fed[:, None] & (drawn >= 0), own, -1)
    more = rows.reshape(-1), drawn.reshape(-1), jnp.ones(num_rows * width, jnp.int32)
    fields = counts.rows, counts.token_ids, counts.counts
    both = (jnp.concatenate(pair) for pair in zip(fields, more, strict=True))
    return DrawnCounts(**dict(zip(("rows", "token_ids", "counts"), both, strict=True)))
