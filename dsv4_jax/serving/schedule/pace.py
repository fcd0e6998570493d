"""Pace: how long a step may take, so that prompts do not stall who waits beside them.

The rules, of which `Pace.choose` is all:

1. While some request decodes, a step that holds prompts has the largest of the given sizes of which
   the predicted time is at most `max_step_ms`. If that is not given, the bound is five steps that
   only decode, as they were seen to take for about as many requests, where these are longer than
   its default: a model or a device on which all steps are long would else read next to nothing.
   Where it matters and none was seen, prompts sit one step out. A size that misses the bound by
   little, as it does once prompts have grown, is not filled, if it fits so.
2. It has at least the smallest size that leaves half of itself to prompts, or the largest there is,
   however long that takes. So prompts are always read on; the oldest one gets half of what they get
   (`scheduler`), so that none waits for ever, and the shortest of the others come next.
3. While nobody decodes, a step has the largest size, unless one by rule 1 would end a prompt which
   the largest would make wait for more tokens than that one holds, of prompts that do not end.
4. Where what waits does not fill a size, a smaller one is taken if it reads more in a second, or
   alone everything in less time: 279 tokens take shapes of 256 and 64, and not one of 1,024.
5. A step that takes longer than `max_step_ms` is not launched behind another: who comes meanwhile
   waits for one such step and not for two.

Without a bound the size is the smallest that holds what waits, or the largest, whatever steps take.
With one size there is nothing to choose, and no time decides about anything but rule 5.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence

import numpy as np

from dsv4_jax.serving.metrics.metrics import Metrics, count_compiles
from dsv4_jax.serving.schedule.call_load import CallLoad
from dsv4_jax.serving.schedule.flight import Flight
from dsv4_jax.serving.schedule.scheduler import RowNeed, StepPlan, StepRows, plan_shards
from dsv4_jax.serving.schedule.step_times import KEPT, StepTimes, middle
from dsv4_jax.serving.sizing import EnginePlan

_DECODE_STEPS = 5
"""Of a bound that is not given."""

_ASKED = 3
"""Times that prompts sit out for the time of a step without them; the host may not wait for it."""

_WAITED = 0.1
"""Share of a step's time for which the host has to have waited for it: else it may have ended
before, while the host or who calls it did something else."""

_RETRIED_AFTER = 512
"""Refusals in a row after which a size is tried again that missed by at most `_NEAR`, or that fits
by what others take now: a device may have been slow for a while. Of the latter each time in vain
doubles them."""
_NEAR = 1.25

_FILL_STEP = 32
"""Tokens; a size that is not filled holds the size below it and a multiple of so many."""


class Pace:
    """Chooses sizes of steps by their time, and learns that time.

    Attributes:
      times: how long steps with prompts take.
      sizes: those that steps may have now.
    """

    def __init__(self, plan: EnginePlan, metrics: Metrics) -> None:
        """Nothing was measured yet.

        Args:
          plan: sizes of the engine.
          metrics: gets the times of steps with prompts.
        """
        devices = 1 if plan.mesh is None else plan.mesh.size
        upper = plan.upper
        share = 0.0 if upper is None else upper.share
        self.times = StepTimes(plan.cost, devices, upper_share=share)
        self._upper_sizes = {} if upper is None else upper.sizes
        self._max_step_s = plan.max_step_s
        self._grows = plan.options.max_step_ms is None and plan.max_step_s < float("inf")
        # Of the last steps without prompts, by the bits of how many requests decoded.
        self._decode_s: dict[int, collections.deque[float]] = {}
        self._asked = collections.Counter[int]()
        self.sizes = plan.step_sizes
        self._slots = plan.pools.max_requests
        self._metrics = metrics
        self._refused = collections.Counter[int]()
        self._in_vain = collections.Counter[int]()
        self._read_s = float("-inf")  # when the last call was read
        self._end_is_known = False  # it ended then
        self._num_compiles = count_compiles()

    def bound_s(self, requests: int) -> float:
        """The longest that a step with prompts may take beside so many requests that decode."""
        seen = self._decode_s.get(requests.bit_length())
        return max(self._max_step_s, _DECODE_STEPS * middle(seen)) if seen else self._max_step_s

    def choose(self, needs: Sequence[Sequence[RowNeed]], lengths: np.ndarray) -> StepPlan:
        """The step of requests of which some wait for several tokens.

        Args:
          needs: as of `plan_shards`.
          lengths: i32[NS], tokens that the requests in slots hold before it.
        """

        def plan_up_to(count: int) -> StepPlan:
            return self._plan(needs, count)

        largest = plan_up_to(len(self.sizes.prompts))
        if not largest.holds_prompts or self._max_step_s == float("inf"):
            return largest
        decoding = [[need for need in shard if need.decodes] for shard in needs]
        most, bound = max(map(len, decoding)), self.bound_s(sum(map(len, decoding)))
        least = next(
            (count for count, size in enumerate(self.sizes.prompts, 1) if size >= 2 * most),
            len(self.sizes.prompts),
        )
        plan, count = largest, self.sizes.prompts.index(largest.size) + 1
        while count > least and not self._fits(plan, lengths, bound):
            part = self._part_of(plan, count, needs, lengths, bound) if most else None
            if part is not None:
                plan = part
                break
            count -= 1
            plan = plan_up_to(count)
        if plan is not largest and self._asks(decoding):
            return plan_shards(decoding, sizes=self.sizes)
        if not most and plan is not largest and not _ends_before_others(plan, largest):
            plan, count = largest, self.sizes.prompts.index(largest.size) + 1
        while count > least:  # a shape that is not full may take long for what it reads
            smaller = plan_up_to(count - 1)
            if not self._is_better(smaller, plan, lengths):
                break
            plan, count = smaller, count - 1
        return plan

    def waits(self, plan: StepPlan, load: CallLoad) -> bool:
        """Whether a step with prompts is not launched behind another, by rule 5."""
        decoding = int(np.count_nonzero(plan.rows.draws & (plan.rows.num_tokens == 1)))
        return self.times.predict(load) > self.bound_s(decoding)

    def learn(self, flight: Flight, waited_from_s: float) -> None:
        """A step was read, for which the host began to wait at that time.

        The device runs steps in order, so that this one began when it was launched or when the one
        before it ended. One with prompts teaches something if the host saw its begin and its end,
        and no program was compiled since the last one.
        """
        read_s, load = flight.read_s, flight.load
        behind = flight.launched_s < self._read_s  # it was launched behind another
        begin_s = self._read_s if behind else flight.launched_s
        seconds, begin_is_known = read_s - begin_s, self._end_is_known or not behind
        self._read_s = read_s
        self._end_is_known = read_s - waited_from_s > _WAITED * seconds
        if load is None and not self._grows:
            return
        before, self._num_compiles = self._num_compiles, count_compiles()
        if not (begin_is_known and self._end_is_known and before == self._num_compiles):
            return
        if load is None:
            bits = flight.rows.slots.size.bit_length()
            seen = self._decode_s.setdefault(bits, collections.deque(maxlen=KEPT))
            seen.append(seconds / flight.plan.num_steps)
        else:
            self._metrics.prompt_step_s.add(seconds)
            self._metrics.predicted_s.add(self.times.predict(load))
            self.times.learn(load, seconds)

    def _asks(self, decoding: Sequence[Sequence[RowNeed]]) -> bool:
        """Whether prompts sit out, for the time of a step of these alone."""
        requests = [need for shard in decoding for need in shard]
        bits = len(requests).bit_length()
        if not self._grows or not requests or bits in self._decode_s or self._asked[bits] >= _ASKED:
            return False
        self._asked[bits] += all(need.draws for need in requests)
        return all(need.draws for need in requests)

    def _is_better(self, small: StepPlan, plan: StepPlan, lengths: np.ndarray) -> bool:
        """Whether a smaller step is better for what waits and does not fill a plan's size.

        Beside requests that decode it is if it reads more tokens in a second, since they get a
        token with every step. Alone it is if such steps read everything in less time, where
        arithmetic decides: a request without company then has the same shapes in every run.
        """
        whole, part = (CallLoad.of(one, lengths[one.rows.slots]) for one in (plan, small))
        shards = len(lengths) // self._slots
        if whole.tokens >= plan.size * shards:
            return False
        if (plan.rows.num_tokens == 1).any():
            rates = [_prompt_tokens(one.rows) / self.times.predict(load)
                     for one, load in ((small, part), (plan, whole))]  # fmt: skip
            return rates[0] > rates[1]
        seconds = self.times.by_arithmetic
        steps, rest = divmod(whole.tokens, part.tokens)
        total = steps * seconds(part)
        if rest:
            size = self.sizes.holding(-(-rest // shards), prompts=True)
            reach = whole.reach * rest / whole.tokens
            total += seconds(CallLoad(size, rest, reach, part.upper))
        return total < seconds(whole)

    def _part_of(
        self,
        plan: StepPlan,
        count: int,
        needs: Sequence[Sequence[RowNeed]],
        lengths: np.ndarray,
        bound: float,
    ) -> StepPlan | None:
        """A step of the size of a plan that is filled as far as it fits the bound.

        None if it does not even with a few tokens more than the size below it holds. `count` are
        the sizes up to that of the plan.
        """

        def filled(most: int) -> StepPlan:
            return self._plan(needs, count, most)

        def seconds(most: int) -> float:
            part = filled(most)
            return self.times.predict(CallLoad.of(part, lengths[part.rows.slots]))

        fills = range(self.sizes.prompts[count - 2] + _FILL_STEP, plan.size, _FILL_STEP)
        if not fills or seconds(fills[0]) > bound:
            return None
        return filled(fills[bisect.bisect_right(fills, bound, key=seconds) - 1])

    def _plan(
        self, needs: Sequence[Sequence[RowNeed]], count: int, most: int | None = None
    ) -> StepPlan:
        """`plan_shards` with the first `count` sizes."""
        return plan_shards(
            needs,
            sizes=self.sizes.first(count),
            most=most,
            upper_sizes=self._upper_sizes,
        )

    def _fits(self, plan: StepPlan, lengths: np.ndarray, bound: float) -> bool:
        load = CallLoad.of(plan, lengths[plan.rows.slots])
        seconds = self.times.predict(load)
        if seconds <= bound:
            self._refused[plan.size] = 0
            if self.times.knows(load):
                self._in_vain[plan.size] = 0
            return True
        self._refused[plan.size] += 1
        after, is_near = _RETRIED_AFTER, seconds <= _NEAR * bound
        if not is_near:
            after <<= self._in_vain[plan.size]
        if self._refused[plan.size] < after:
            return False
        if is_near or self.times.by_latest(load) <= bound:
            self._refused[plan.size] = 0
            self._in_vain[plan.size] += not is_near
            self.times.doubt(load)
        return False


def _prompt_tokens(rows: StepRows) -> int:
    """Tokens of rows that only prompts have; neither drafts nor a decoding row's token."""
    return int(rows.num_tokens[rows.num_tokens > 1].sum())


def _ends_before_others(small: StepPlan, large: StepPlan) -> bool:
    """Whether a small step ends a prompt that a large one makes wait for others' tokens.

    Those are of prompts that do not end in it, and more than the small step holds.
    """
    unended = large.rows.num_tokens[~large.rows.draws].sum()
    return bool(small.rows.draws.any()) and unended > small.size
