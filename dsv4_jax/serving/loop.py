"""ServingLoop: queue, slots and steps; what happens between two calls of the device."""

from __future__ import annotations

import bisect
import time

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.verify import Report, Seals, verify_cache
from dsv4_jax.serving.metrics import Metrics
from dsv4_jax.serving.request import Request, Token
from dsv4_jax.serving.runner import Boundary, StepResult, StepRunner
from dsv4_jax.serving.scheduler import RowNeed, RowPlan, StepPlan, plan_step


class CacheError(RuntimeError):
    """The verifier found a problem in the cache; the message lists what."""


class ServingLoop:
    """Serves requests by steps.

    The order of a step: admit, reserve blocks, plan, bring changes to the device, run, and only
    then count. A step that raises has counted nothing.

    Attributes:
      manager: who holds which slot and blocks.
      waiting: requests without a slot, oldest first.
      running: by slot.
      metrics: counters.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        sizes: tuple[int, ...],
        plain_size: int | None,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        debug: bool,
    ) -> None:
        """Starts without requests; arguments as in `Engine`."""
        self.runner = runner
        self.metrics = metrics
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self._sizes = sizes
        self._plain_size = plain_size
        self._tokenizer = tokenizer
        self._debug = debug
        self._seals: Seals | None = None
        self._evicted_before = (0, 0)
        self.manager: KVCacheManager = self._new_manager()
        self._update_gauges()

    def enqueue(self, request: Request) -> None:
        """A request joins the queue, at the place of its age."""
        bisect.insort(self.waiting, request, key=lambda other: other.request_id)
        self._update_gauges()

    def fork(self, request: Request, new: Request) -> None:
        """The new request shares what a running one has; where that cannot be, it waits."""
        if request.slot >= 0 and self.manager.num_free_slots:
            length = int(self.manager.length_tokens[request.slot])
            self.manager.share(request.slot, request.known)
            try:
                slot = self.manager.fork(request.slot, max(self._wanted_tokens(new), length))
            except RuntimeError:
                slot = -1  # no blocks now
            if slot >= 0:
                new.drafts = list(request.drafts)
                self._start(new, slot)
                self._update_gauges()
                return
        self.enqueue(new)

    def end(self, request: Request) -> None:
        """A request that has a finish reason leaves slot or queue."""
        if request.slot >= 0:
            self._leave_slot(request)
        else:
            self.waiting = [other for other in self.waiting if other is not request]
        reason = request.finish_reason or "error"
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        self._update_gauges()

    def preempt(self, request: Request) -> None:
        """A running request gives slot and blocks back and waits; its prefix may stay cached."""
        self._leave_slot(request)
        request.drafts = []
        self.metrics.preempted += 1
        self.enqueue(request)

    def step(self) -> list[Token]:
        """Serves every running request once; see `Engine.step`."""
        self._admit()
        self._reserve()
        if not self.running:
            return []
        plan = plan_step(self._needs(), sizes=self._sizes, plain_size=self._plain_size)
        boundaries: list[Boundary] = []
        is_applied = False
        try:
            self.runner.apply(self.manager)
            is_applied = True
            if not plan.is_plain:
                boundaries = self._plan_boundaries(plan)
            lengths = self.manager.length_tokens
            result = self.runner.run(plan, self.running, lengths, boundaries)
        except BaseException:
            self._recover(boundaries, is_lost=self.runner.is_lost or not is_applied)
            raise
        self.metrics.steps += 1
        try:
            tokens, failure = self._collect(plan, result, boundaries)
        except BaseException:
            self._recover([], is_lost=True)  # the device is ahead of what was counted
            raise
        self._update_gauges()
        if self._debug:
            self._verify()
        if failure is not None:
            raise failure
        return tokens

    def verify(self) -> Report:
        """Checks the whole cache, against the last check too; see `verify_cache`."""
        self.runner.apply(self.manager)
        ledger = self.manager.ledger()
        return verify_cache(self.runner.cache, ledger, self._seals, self.runner.store)

    def _new_manager(self) -> KVCacheManager:
        plan = self.runner.plan
        return KVCacheManager(
            self.runner.config,
            max_requests=plan.max_requests,
            max_context_tokens=plan.max_context_tokens,
            num_blocks=plan.num_blocks,
            num_snapshots=plan.num_snapshots,
            cache_format=self.runner.cache_format,
            poison=self._debug,
        )

    def _wanted_tokens(self, request: Request) -> int:
        """Tokens that a request needs blocks for now: those known, and those in flight."""
        total = len(request.token_ids)
        return min(request.num_known + self.runner.draft_tokens + 1, total)

    def _admit(self) -> None:
        """Moves waiting requests to free slots, in order, while there is room for all to go on."""
        while self.waiting:
            request, wanted = self.waiting[0], self._wanted_tokens(self.waiting[0])
            history = (request.known, request.options.salt)
            if not self.manager.can_admit(wanted, *history, spare_blocks=len(self.running)):
                return
            known = self.manager.known_tokens(*history)
            slot = self.manager.admit(wanted, *history)
            del self.waiting[0]
            hit = self.manager.hit_tokens(slot)
            request.next_boundary = known if known > hit else 0
            blocks = request.num_known // self.runner.plan.block_tokens
            places = max(self.runner.plan.num_snapshots // 2, 1)
            request.snapshot_spacing = max(-(-blocks // places), 1)
            self.metrics.hit_tokens += hit
            self.metrics.prefix_hits += hit > 0
            self.metrics.prefix_misses += hit == 0
            self._start(request, slot)

    def _start(self, request: Request, slot: int) -> None:
        request.slot = slot
        self.running[slot] = request
        if request.admitted_s is None:
            request.admitted_s = time.perf_counter()
            self.metrics.queue_s.add(request.admitted_s - request.submitted_s)

    def _leave_slot(self, request: Request) -> None:
        self.manager.release(request.slot)
        del self.running[request.slot]
        request.slot = -1

    def _by_age(self) -> list[Request]:
        return sorted(self.running.values(), key=lambda request: request.request_id)

    def _reserve(self) -> None:
        """Blocks for what the next step appends; the youngest give theirs back if need be."""
        for request in self._by_age():
            while request.slot >= 0:
                try:
                    self.manager.extend(request.slot, self._wanted_tokens(request))
                    break
                except RuntimeError:
                    self.preempt(self._by_age()[-1])

    def _needs(self) -> list[RowNeed]:
        needs = []
        for request in self._by_age():
            length = int(self.manager.length_tokens[request.slot])
            pending = request.num_known - length
            assert pending > 0, f"slot {request.slot} holds {length} of {request.num_known} tokens"
            limit = request.num_wanted - 1 if request.options.speculate else 0
            request.drafts = request.drafts[:limit]
            needs.append(RowNeed(request.slot, pending, len(request.drafts)))
        return needs

    def _plan_boundaries(self, plan: StepPlan) -> list[Boundary]:
        """Boundaries that this step reaches and that are worth a snapshot, with a place each."""
        boundaries = []
        for row in plan.rows:
            length = int(self.manager.length_tokens[row.slot])
            end = length + row.num_tokens + row.num_drafts
            boundaries += self._boundaries_of(self.running[row.slot], length, end)
        return boundaries

    def _boundaries_of(self, request: Request, length: int, end: int) -> list[Boundary]:
        size, boundaries = self.runner.plan.block_tokens, []
        for boundary in range((length // size + 1) * size, end + 1, size):
            if self._is_worth_keeping(request, boundary):
                if boundary - size > request.prompt_tokens:
                    # Who continues an answer comes in at its end: the prompt's are worth more.
                    self.manager.demote_snapshot(request.slot, boundary - size)
                place = self.manager.begin_snapshot()
                if place >= 0:
                    boundaries.append(Boundary(request.slot, boundary, place))
        return boundaries

    def _is_worth_keeping(self, request: Request, boundary: int) -> bool:
        """Whether a snapshot of this boundary would serve somebody.

        Evenly spaced boundaries of a prompt are, its last ones, the one where it leaves what is
        known, and all that an answer reaches, for the prompt that continues it.
        """
        if not self.runner.plan.num_snapshots:
            return False
        size, prompt = self.runner.plan.block_tokens, request.prompt_tokens
        is_last = boundary > prompt - size - 1
        is_spaced = (boundary // size) % request.snapshot_spacing == 0
        if not (is_last or is_spaced or boundary == request.next_boundary):
            return False
        known = request.known[:boundary]
        return len(known) < boundary or not self.manager.is_resumable(request.slot, known)

    def _collect(
        self, plan: StepPlan, result: StepResult, boundaries: list[Boundary]
    ) -> tuple[list[Token], Exception | None]:
        """Counts what the step did, shares full blocks, and hands out the tokens.

        Returns:
          The tokens, and what was raised for one request alone.
        """
        now, tokens, failure = time.perf_counter(), [], None
        rows = [(row, self.running[row.slot]) for row in plan.rows]
        for row, request in rows:
            self._count(row, request, result)
        self._keep(boundaries)
        if plan.is_plain:
            self._save_reached([request for _, request in rows])
        for row, request in rows:
            if not row.draws:
                continue
            drawn = [int(token) for token in result.token_ids[row.slot] if token >= 0]
            try:
                tokens += self._hand_out(request, drawn, now)
            except Exception as error:
                request.finish_reason, failure = "error", error
            if request.finish_reason is None:
                request.drafts = result.draft_token_ids[row.slot].tolist()
            else:
                self.end(request)
        return tokens, failure

    def _keep(self, boundaries: list[Boundary]) -> None:
        """Snapshots that a step has written, for who comes after."""
        for boundary in boundaries:
            self.metrics.snapshots += self.manager.keep_snapshot(*boundary)

    def _count(self, row: RowPlan, request: Request, result: StepResult) -> None:
        kept = int(result.num_kept[row.slot])
        length = int(self.manager.length_tokens[row.slot])
        self.manager.advance(row.slot, kept)
        self.metrics.drafted_tokens += row.num_drafts
        self.metrics.accepted_tokens += kept - row.num_tokens
        size = self.runner.plan.block_tokens
        if (length + kept) // size > length // size:
            accepted = request.drafts[: kept - row.num_tokens]
            known = request.token_ids[: length + row.num_tokens]
            self.manager.share(row.slot, np.concatenate([known, np.array(accepted, np.int32)]))

    def _save_reached(self, requests: list[Request]) -> None:
        boundaries = []
        for request in requests:
            length = int(self.manager.length_tokens[request.slot])
            boundaries += self._boundaries_of(request, length - 1, length)
        if boundaries:
            self.runner.save(boundaries)
            self._keep(boundaries)

    def _hand_out(self, request: Request, drawn: list[int], now: float) -> list[Token]:
        tokens = []
        for token_id in drawn:
            request.add(token_id, self._tokenizer)
            token = Token(request.request_id, token_id, request.finish_reason)
            request.events.append(token)
            tokens.append(token)
            self.metrics.generated_tokens += 1
            if request.last_token_s is None:
                self.metrics.first_token_s.add(now - request.submitted_s)
            else:
                self.metrics.token_s.add((now - request.last_token_s) / len(drawn))
            if request.finish_reason is not None:
                break
        request.last_token_s = now
        return tokens

    def _recover(self, boundaries: list[Boundary], *, is_lost: bool) -> None:
        """After a call that raised: nothing was counted; what was lost is computed again."""
        for boundary in boundaries:
            self.manager.drop_snapshot(boundary.place)
        if not is_lost:
            return
        for request in list(self.running.values()):
            if request.finish_reason is None:
                self.preempt(request)
            else:
                self.end(request)
        self.runner.rebuild()
        self._evicted_before = self._evicted()
        self.manager, self._seals = self._new_manager(), None
        self._update_gauges()

    def _verify(self) -> None:
        report = self.verify()
        self._seals = report.seals
        if report.problems:
            raise CacheError(str(report))

    def _evicted(self) -> tuple[int, int]:
        """Blocks and snapshots, those of managers that were lost included."""
        blocks, snapshots = self._evicted_before
        return blocks + self.manager.num_evicted, snapshots + self.manager.num_evicted_snapshots

    def _update_gauges(self) -> None:
        metrics, manager, plan = self.metrics, self.manager, self.runner.plan
        metrics.running, metrics.waiting = len(self.running), len(self.waiting)
        metrics.cached_blocks = manager.num_cached_blocks
        metrics.free_blocks = manager.num_free_blocks - manager.num_cached_blocks
        metrics.used_blocks = plan.num_blocks - manager.num_free_blocks
        metrics.evicted_blocks, metrics.evicted_snapshots = self._evicted()
        metrics.used_bytes = {
            family: used * metrics.used_blocks
            if family.endswith(("entries", "keys"))
            else used * len(self.running)
            for family, used in self.runner.unit_bytes.items()
        } | {"snapshots": manager.num_held_snapshots * plan.bytes_per_snapshot}
