"""What the next step runs: a pure function of what every request waits for.

Every request that only decodes is in every step, so that a long prompt never stalls an answer.
Of the tokens that are left, the oldest prompt gets half and the others share the rest, those with
least left first: a short prompt behind long ones soon has its first token, and since every prompt
becomes the oldest in time, none starves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dsv4_jax.serving.step_sizes import StepSizes


@dataclasses.dataclass(frozen=True)
class RowNeed:
    """What a running request waits for.

    Attributes:
      slot: its slot.
      num_pending: tokens that are known but not in the cache; at least 1.
      num_drafts: guesses at what follows them.
      draws: the step that runs the last of them draws the next token.
      rests: upper layers may be left out for them.
    """

    slot: int
    num_pending: int
    num_drafts: int
    draws: bool = True
    rests: bool = False

    @property
    def decodes(self) -> bool:
        """It waits for one token, for which all layers run."""
        return self.num_pending == 1 and not self.rests


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """What a step runs of a request.

    Attributes:
      slot: its slot.
      num_tokens: known tokens, from the first pending one on.
      num_drafts: guesses after them; 0 where tokens stay pending.
      draws: the step draws the next token; else tokens stay pending.
      rests: upper layers are left out for it.
    """

    slot: int
    num_tokens: int
    num_drafts: int
    draws: bool
    rests: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class StepRows:
    """What a step runs of all requests: `RowPlan`s as columns.

    Attributes:
      slots: i32[n].
      num_tokens: i32[n].
      num_drafts: i32[n].
      draws: bool[n].
      num_steps: i32[n], steps of the call that the row takes part in. Each draws a token, and
        checks as many drafts.
      rests: bool[n].
    """

    slots: np.ndarray
    num_tokens: np.ndarray
    num_drafts: np.ndarray
    draws: np.ndarray
    num_steps: np.ndarray
    rests: np.ndarray

    @property
    def num_appended(self) -> np.ndarray:
        """i32[n], tokens that the call surely appends: those known, and all drawn but the last."""
        return self.num_tokens + self.num_steps - 1

    @property
    def num_drawn(self) -> np.ndarray:
        """i32[n], tokens that the call surely draws."""
        return self.draws * self.num_steps

    @property
    def spread(self) -> np.ndarray:
        """i32[n], so many more may be appended and drawn: the drafts of all steps."""
        return self.num_drafts * self.num_steps

    @classmethod
    def of(cls, rows: Sequence[RowPlan]) -> StepRows:
        """The same rows as columns."""

        def column(name: str) -> np.ndarray:
            return np.array([getattr(row, name) for row in rows], np.int32)

        draws, rests = (
            np.array([getattr(row, name) for row in rows], bool) for name in ("draws", "rests")
        )
        once, slots = np.ones(len(rows), np.int32), column("slot")
        return cls(slots, column("num_tokens"), column("num_drafts"), draws, once, rests)

    def __len__(self) -> int:
        """Rows."""
        return len(self.slots)

    def __iter__(self) -> Iterator[RowPlan]:
        """Row by row."""
        columns = (self.slots, self.num_tokens, self.num_drafts, self.draws, self.rests)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return itertools.starmap(RowPlan, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """One step.

    Attributes:
      rows: what it runs.
      size: T, tokens of the step's shape, of one data shard.
      is_plain: one token of each row, by programs that do nothing else.
      holds_prompts: some of its tokens are of requests that wait for more than one.
      num_steps: steps of the call; 1, or what a call of several makes.
      upper_size: U, tokens that its upper layers run, of a data shard: those of rows that do not
        rest; None is all.
    """

    rows: StepRows
    size: int
    is_plain: bool
    holds_prompts: bool = False
    num_steps: int = 1
    upper_size: int | None = None

    @classmethod
    def idle(
        cls,
        size: int,
        *,
        is_plain: bool = False,
        holds_prompts: bool = False,
        num_steps: int = 1,
        upper_size: int | None = None,
    ) -> StepPlan:
        """A step without rows."""
        return cls(StepRows.of(()), size, is_plain, holds_prompts, num_steps, upper_size)

    @property
    def draws_apart(self) -> bool:
        """Its draws are a program of their own, which steps of all sizes share."""
        return self.is_plain and self.num_steps == 1


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """A data shard's part of a step; fields as in `StepPlan`."""

    rows: tuple[RowPlan, ...]
    holds_prompts: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, drafts too."""
        return sum(row.num_tokens + row.num_drafts for row in self.rows)

    @property
    def num_upper(self) -> int:
        """Those of rows that do not rest."""
        return sum(row.num_tokens + row.num_drafts for row in self.rows if not row.rests)


def plan_decoding(
    slots: np.ndarray,
    num_drafts: np.ndarray,
    shards: np.ndarray,
    *,
    sizes: StepSizes,
    most_steps: np.ndarray | None = None,
    steps_per_call: int = 1,
) -> StepPlan:
    """`plan_shards` of requests that wait for one token each, without a loop over them.

    A call makes several steps where some request takes part in all of them, and requests are idle
    in at most half: a step takes as long whatever is idle in it.

    Args:
      slots: i32[n], the requests' slots among all shards.
      num_drafts: i32[n], guesses at what follows each one's token.
      shards: i32[n], the data shard of each.
      sizes: those of one shard.
      most_steps: i32[n], steps that each can take part in, at least 1; None is one each.
      steps_per_call: steps of a call that makes several.
    """
    order = np.argsort(shards, kind="stable") if shards.any() else slice(None)
    once = np.ones_like(slots)
    steps = once if most_steps is None else np.minimum(most_steps, steps_per_call)[order]
    slots, num_drafts, shards = slots[order], num_drafts[order], shards[order]
    totals = np.bincount(shards, weights=1 + num_drafts)
    num_drafts = np.where(totals[shards] <= sizes.decoding[-1], num_drafts, 0).astype(np.int32)
    if steps.max() < steps_per_call or 2 * steps.mean() < steps_per_call:
        steps, steps_per_call = once, 1
    everyone = np.ones(len(slots), bool)
    rows = StepRows(slots, once, num_drafts, everyone, steps, ~everyone)
    fullest = np.bincount(shards, weights=1 + num_drafts).max()
    size = sizes.holding(int(fullest), prompts=False)
    return StepPlan(rows, size, sizes.is_plain, num_steps=steps_per_call)


def plan_shards(
    needs: Sequence[Sequence[RowNeed]],
    *,
    sizes: StepSizes,
    most: int | None = None,
    upper_sizes: Mapping[int, int] = MappingProxyType({}),
) -> StepPlan:
    """Fills one step on every data shard; all of them run the same program.

    Args:
      needs: by data shard, running requests, the oldest first; slots are those among all shards.
      sizes: those of one shard.
      most: as in `plan_step`, of one shard.
      upper_sizes: by size, tokens that the upper layers run in steps in which some rest, likewise;
        a size without has no such step.

    Returns:
      The plan, its rows one shard's after the other's. Its size is the smallest that holds the
      rows of the fullest shard. Nobody rests where all others have more tokens than upper layers
      run then.
    """
    upper = upper_sizes.get(sizes.prompts[-1], 0)
    plans = [plan_step(shard, sizes=sizes, most=most, upper=upper) for shard in needs]
    rows = StepRows.of([row for plan in plans for row in plan.rows])
    holds_prompts = any(plan.holds_prompts for plan in plans)
    size = sizes.holding(max(plan.num_tokens for plan in plans), prompts=holds_prompts)
    if not holds_prompts:
        return StepPlan(rows, size, sizes.is_plain)
    upper_size: int | None = upper_sizes.get(size, 0)
    if not rows.rests.any() or max(plan.num_upper for plan in plans) > upper_size:
        rows, upper_size = dataclasses.replace(rows, rests=np.zeros_like(rows.rests)), None
    return StepPlan(rows, size, False, holds_prompts=True, upper_size=upper_size)


def plan_step(
    needs: Sequence[RowNeed],
    *,
    sizes: StepSizes,
    most: int | None = None,
    upper: int = 0,
) -> ShardPlan:
    """Fills one shard's part of a step.

    Args:
      needs: running requests, the oldest first.
      sizes: shapes; the largest of those with prompts holds at least one token of each.
      most: tokens that it may hold, at least one of each request; None is the largest size.
      upper: the most tokens for which all layers run in a step of the largest shape in which some
        rest; 0 has no such step. Where the oldest prompt may rest, others get no more.

    Returns:
      The plan.
    """
    limit = sizes.prompts[-1] if most is None else most
    decoding = [need for need in needs if need.decodes]
    prompts = [need for need in needs if not need.decodes]
    with_drafts = sum(1 + need.num_drafts for need in decoding)
    # Drafts are worth less than a prompt's progress where both do not fit.
    keeps_drafts = with_drafts <= (limit // 2 if prompts else limit)
    rows = {
        need.slot: RowPlan(need.slot, 1, need.num_drafts if keeps_drafts else 0, need.draws)
        for need in decoding
    }
    left = limit - sum(row.num_tokens + row.num_drafts for row in rows.values())
    shares, at_once = _share(prompts, left), upper - (limit - left)
    if prompts and prompts[0].rests and 0 < at_once < _count_awake(shares):
        shares = _share([need for need in prompts if not need.rests], at_once)
        shares += _share([need for need in prompts if need.rests], left - _count_awake(shares))
    for need, chunk in shares:
        draws = need.draws and chunk == need.num_pending
        rows[need.slot] = RowPlan(need.slot, chunk, 0, draws, need.rests)
    ordered = tuple(rows[need.slot] for need in needs if need.slot in rows)
    return ShardPlan(ordered, holds_prompts=bool(prompts))


def _count_awake(shares: Sequence[tuple[RowNeed, int]]) -> int:
    """Tokens of prompts that do not rest."""
    return sum(chunk for need, chunk in shares if not need.rests)


def _share(prompts: Sequence[RowNeed], left: int) -> list[tuple[RowNeed, int]]:
    """Half to the oldest, the rest to the others by what they have left; nothing stays unused."""
    if not prompts or left < 1:
        return []
    chunks = dict.fromkeys((need.slot for need in prompts), 0)
    first, others = prompts[0], sorted(prompts[1:], key=lambda need: need.num_pending)
    chunks[first.slot] = min(first.num_pending, left if not others else -(-left // 2))
    left -= chunks[first.slot]
    for need in [*others, first]:
        more = min(need.num_pending - chunks[need.slot], left)
        chunks[need.slot] += more
        left -= more
    return [(need, chunks[need.slot]) for need in prompts if chunks[need.slot]]
