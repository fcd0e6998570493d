"""ServingLoop: one step after another; what happens between two calls of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.seals import Seals
from dsv4_jax.allocator.verify import Report, verify_scan
from dsv4_jax.serving.calls import UndoLog
from dsv4_jax.serving.metrics import Metrics
from dsv4_jax.serving.request import Request, Token, TokenLogprobs
from dsv4_jax.serving.request_queue import RequestQueue
from dsv4_jax.serving.runner import StepResult, StepRunner
from dsv4_jax.serving.scheduler import RowNeed, RowPlan, StepPlan, plan_shards
from dsv4_jax.serving.sizing import EnginePlan
from dsv4_jax.serving.snapshot_policy import Boundary, take_boundaries


class CacheError(RuntimeError):
    """The verifier found a problem in the cache; the message lists what."""


class ServingLoop:
    """Serves requests by steps.

    The order of a step: admit, reserve blocks, plan, bring changes to the device, run, and only
    then count. Every method but `restart` belongs to a change of the `UndoLog`; after one that
    raised, `restart` makes queue, manager and arrays anew from what the requests know.

    Attributes:
      runner: the device's side.
      queue: who waits and who runs.
      metrics: counters.
    """

    def __init__(
        self,
        runner: StepRunner,
        plan: EnginePlan,
        *,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        undo: UndoLog,
    ) -> None:
        """Starts without requests.

        Args:
          runner: the device's side, of the same plan.
          plan: sizes of the engine.
          tokenizer: for stop texts, or None.
          metrics: counters of the engine.
          undo: where the change in progress saves what it changes of requests.
        """
        self.runner = runner
        self.metrics = metrics
        self._plan = plan
        self._tokenizer = tokenizer
        self._undo = undo
        self._seals: Seals | tuple[Seals, ...] | None = None
        self._evicted_before = (0, 0)
        self.queue = RequestQueue(
            self._new_shards(), draft_tokens=plan.draft_tokens, metrics=metrics, undo=undo
        )
        self._update_gauges()

    @property
    def shards(self) -> DataShards:
        """Who holds which slot and blocks."""
        return self.queue.shards

    def enqueue(self, request: Request) -> None:
        """A request joins the queue."""
        self.queue.enqueue(request)
        self._update_gauges()

    def fork(self, request: Request, new: Request) -> None:
        """The new request goes on from what another has."""
        self.queue.fork(request, new)
        self._update_gauges()

    def end(self, request: Request) -> None:
        """A request that has a finish reason leaves slot or queue."""
        self.queue.remove(request)
        reason, finished = request.finish_reason or "error", self.metrics.finished
        self.metrics.finished = finished | {reason: finished.get(reason, 0) + 1}
        self._update_gauges()

    def preempt(self, request: Request) -> None:
        """A running request gives slot and blocks back and waits."""
        self.queue.preempt(request)
        self._update_gauges()

    def restart(self, requests: Sequence[Request]) -> None:
        """Everything is empty, and the unfinished requests wait, as they are."""
        self._evicted_before = (self.metrics.evicted_blocks, self.metrics.evicted_snapshots)
        self.runner.rebuild()
        self.queue.restart(self._new_shards(), requests)
        self._seals = None
        self._update_gauges()

    def step(self, alone: Request | None = None) -> list[Token]:
        """Serves every running request once, or one alone if it runs; see `Engine.step`."""
        self.queue.admit()
        self.queue.reserve()
        self._update_gauges()
        running = self.queue.running
        if not running:
            return []
        if alone is not None and alone.slot >= 0:
            running = {alone.slot: alone}
        running = self.runner.fitting(running)
        plan = plan_shards(
            self._needs(running), sizes=self._plan.step_sizes, plain_size=self._plan.plain_size
        )
        self.runner.apply(self.shards)
        boundaries = [] if plan.is_plain else self._take_boundaries(plan)
        result = self.runner.run(plan, running, self.shards.length_tokens, boundaries)
        self.metrics.steps += 1
        tokens = self._collect(plan, result, boundaries)
        self._update_gauges()
        if self._plan.debug:
            self._verify()
        return tokens

    def verify(self) -> Report:
        """Checks the whole cache, against the last check too; see `verify_cache`."""
        self.runner.apply(self.shards)
        found = self.runner.devices.scan()
        return verify_scan(self.runner.cache, found, self.shards.ledgers(), self._seals)

    def _new_shards(self) -> DataShards:
        plan = self.runner.plan
        managers = [
            KVCacheManager(
                self.runner.config,
                max_requests=plan.max_requests,
                max_context_tokens=plan.max_context_tokens,
                num_blocks=plan.num_blocks,
                num_snapshots=plan.num_snapshots,
                cache_format=self.runner.cache_format,
                poison=self._plan.debug,
                block_parts=plan.block_parts,
            )
            for _ in range(self._plan.data_shards)
        ]
        return DataShards(managers)

    def _needs(self, running: dict[int, Request]) -> list[list[RowNeed]]:
        """By data shard, what its requests wait for."""
        needs: list[list[RowNeed]] = [[] for _ in self.shards.managers]
        for request in sorted(running.values(), key=lambda request: request.request_id):
            length = self.shards.length_of(request.slot)
            pending = request.num_known - length
            assert pending > 0, f"slot {request.slot} holds {length} of {request.num_known} tokens"
            limit = request.num_wanted - 1 if request.speculate else 0
            request.drafts = request.drafts[:limit]
            need = RowNeed(request.slot, pending, len(request.drafts))
            if pending > 1 and request.followers:  # they fork before the last token
                need = RowNeed(request.slot, pending - 1, 0, draws=False)
            needs[self.shards.shard_of(request.slot)].append(need)
        return needs

    def _take_boundaries(self, plan: StepPlan) -> list[Boundary]:
        """Boundaries that this step reaches and that are worth a snapshot, with a place each."""
        boundaries = []
        for row in plan.rows:
            length = self.shards.length_of(row.slot)
            end = length + row.num_tokens + row.num_drafts
            request = self.queue.running[row.slot]
            boundaries += take_boundaries(request, self.shards, length, end)
        return boundaries

    def _collect(
        self, plan: StepPlan, result: StepResult, boundaries: list[Boundary]
    ) -> list[Token]:
        """Counts what the step did, shares full blocks, and hands out the tokens."""
        now, tokens = time.perf_counter(), []
        rows = [(row, self.queue.running[row.slot]) for row in plan.rows]
        for row, request in rows:
            self._count(row, request, result)
        self._keep(boundaries)
        if plan.is_plain:
            self._save_reached([request for _, request in rows])
        for row, request in rows:
            if not row.draws:
                continue
            self._undo.save(request)
            drawn = [int(token) for token in result.token_ids[row.slot] if token >= 0]
            logprobs = _logprobs_of(request, result, len(drawn))
            tokens += self._hand_out(request, drawn, logprobs, now)
            if request.finish_reason is None:
                request.drafts = result.draft_token_ids[row.slot].tolist()
            else:
                self.end(request)
        return tokens

    def _keep(self, boundaries: list[Boundary]) -> None:
        """Snapshots that a step has written, for who comes after."""
        for boundary in boundaries:
            manager, own = self.shards.of(boundary.slot)
            kept = manager.prefixes.keep_snapshot(own, boundary.end, boundary.place)
            self.metrics.snapshots += kept

    def _count(self, row: RowPlan, request: Request, result: StepResult) -> None:
        kept = int(result.num_kept[row.slot])
        length = self.shards.length_of(row.slot)
        manager, own = self.shards.of(row.slot)
        manager.advance(own, kept)
        self.metrics.drafted_tokens += row.num_drafts
        self.metrics.accepted_tokens += kept - row.num_tokens
        size = self.runner.plan.block_tokens
        if (length + kept) // size > length // size:
            accepted = request.drafts[: kept - row.num_tokens]
            known = request.token_ids[: length + row.num_tokens]
            manager.share(own, np.concatenate([known, np.array(accepted, np.int32)]))

    def _save_reached(self, requests: list[Request]) -> None:
        boundaries = []
        for request in requests:
            length = self.shards.length_of(request.slot)
            boundaries += take_boundaries(request, self.shards, length - 1, length)
        if boundaries:
            self.runner.save(boundaries)
            self._keep(boundaries)

    def _hand_out(
        self,
        request: Request,
        drawn: list[int],
        logprobs: Sequence[TokenLogprobs | None],
        now: float,
    ) -> list[Token]:
        """Adds drawn tokens; what that raises ends this request alone."""
        tokens = []
        for token_id, its_logprobs in zip(drawn, logprobs, strict=True):
            try:
                request.add(token_id, self._tokenizer, its_logprobs)
            except Exception as error:
                request.finish_reason, request.error = "error", error
                return tokens
            tokens.append(request.token(request.num_drawn - 1))
            self.metrics.generated_tokens += 1
            if request.last_token_s is None:
                self.metrics.first_token_s.add(now - request.submitted_s)
            else:
                self.metrics.token_s.add((now - request.last_token_s) / len(drawn))
            if request.finish_reason is not None:
                break
        request.last_token_s = now
        return tokens

    def _verify(self) -> None:
        report = self.verify()
        self._seals = report.seals
        if report.problems:
            raise CacheError(str(report))

    def _evicted(self) -> tuple[int, int]:
        """Blocks and snapshots, those of managers that were lost included."""
        blocks, snapshots = self._evicted_before
        for manager in self.shards.managers:
            blocks += manager.num_evicted
            snapshots += manager.prefixes.num_evicted_snapshots
        return blocks, snapshots

    def _update_gauges(self) -> None:
        metrics = self.metrics
        metrics.running, metrics.waiting = len(self.queue.running), len(self.queue.waiting)
        metrics.evicted_blocks, metrics.evicted_snapshots = self._evicted()
        metrics.count_cache(self.shards.managers, self.runner.unit_bytes)


def _logprobs_of(
    request: Request, result: StepResult, num_drawn: int
) -> Sequence[TokenLogprobs | None]:
    """Of each token that a step drew for a running request; None where it asks for none."""
    count, found = request.sampling.logprobs, result.logprobs
    if count is None or found is None:
        return [None] * num_drawn
    slot = request.slot
    return [
        TokenLogprobs(
            float(found.drawn[slot, place]),
            tuple(
                zip(
                    found.token_ids[slot, place, :count].tolist(),
                    found.top[slot, place, :count].tolist(),
                    strict=True,
                )
            ),
        )
        for place in range(num_drawn)
    ]
