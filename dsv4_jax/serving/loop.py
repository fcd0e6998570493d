"""ServingLoop: one step after another; what happens between two calls of the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.seals import Seals
from dsv4_jax.allocator.verify import Report, verify_scan
from dsv4_jax.serving.device.hand_out import HandOut
from dsv4_jax.serving.device.host_copies import HostCopies, make_host_copies
from dsv4_jax.serving.device.request_rows import put_request
from dsv4_jax.serving.device.runner import StepRunner
from dsv4_jax.serving.device.step_result import StepResult
from dsv4_jax.serving.metrics.metrics import Gauges, Metrics, idle_gauges, shard_gauges
from dsv4_jax.serving.requests.cached_rows import CachedRows
from dsv4_jax.serving.requests.calls import CacheError, UndoLog
from dsv4_jax.serving.requests.request import DrawError, Request, Token
from dsv4_jax.serving.requests.token_texts import TokenTexts
from dsv4_jax.serving.schedule.appended import count_appended
from dsv4_jax.serving.schedule.call_load import CallLoad
from dsv4_jax.serving.schedule.far_prefixes import NoFarPrefixes
from dsv4_jax.serving.schedule.flight import Flight, Outlook, look
from dsv4_jax.serving.schedule.pace import Pace
from dsv4_jax.serving.schedule.request_queue import RequestQueue
from dsv4_jax.serving.schedule.running import Running
from dsv4_jax.serving.schedule.step_boundaries import find_crossed, find_reached, keep_written
from dsv4_jax.serving.schedule.step_plans import make_plan, note_rests
from dsv4_jax.serving.sizing import EnginePlan


class ServingLoop:
    """Serves requests by steps.

    A step is launched, in the order: admit, reserve blocks, plan, bring changes to the device, run.
    If the next one can be planned by what is known already (`look_ahead`), it is launched too,
    before the first is read and counted. So between two calls a step may be in flight. What leaves
    its slot then has a row there whose result is thrown away: the device runs launches in order, so
    that who gets the slot or the blocks later writes after that row.

    Every method but `restart` belongs to a change of the `UndoLog`; after one that raised,
    `restart` makes queue, manager and arrays anew from what the requests know, and a step in flight
    is forgotten.

    Attributes:
      plan: sizes of the engine; `runner`: the device's side.
      queue: who waits and who runs; `metrics`: counters; `options`: the engine's.
      flight: the step that was launched and not handed out; None if there is none.
      host: copies of prefixes on the host; None if there are none.
      clock: gives seconds.
      texts: of tokens, if there is a tokenizer; `seals`: of the last check of the cache.
      pace: how long steps may take, and how long they take.
      alone: the one request that the step in progress serves, or the last one did; None is all.
    """

    def __init__(
        self,
        runner: StepRunner,
        plan: EnginePlan,
        *,
        texts: TokenTexts | None,
        metrics: Metrics,
        undo: UndoLog,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts without requests.

        Args:
          runner: the device's side, of the same plan.
          plan: sizes of the engine.
          texts: of tokens, if there is a tokenizer.
          metrics: counters of the engine.
          undo: where the change in progress saves what it changes of requests.
          clock: seconds, of all times that are told or learned.
        """
        self.runner, self.metrics, self.clock = runner, metrics, clock
        self.pace = Pace(plan, metrics)
        self.plan, self.options, self.texts, self._undo = plan, plan.options, texts, undo
        self.seals: Seals | tuple[Seals, ...] | None = None
        self._evicted_before, self._returns = (0, 0), True
        self.alone: Request | None = None
        self.flight: Flight[StepResult] | None = None
        self._reading: Flight[StepResult] | None = None  # beside that one
        self.host: HostCopies | None = None
        self.queue = RequestQueue(
            self.new_shards(),
            step_tokens=plan.call_tokens,
            metrics=metrics,
            undo=undo,
            clock=clock,
            bring=self._bring,
            far=lambda: self.host or NoFarPrefixes(),
            upper=plan.upper,
        )

    @property
    def shards(self) -> DataShards:
        """Who holds which slot and blocks."""
        return self.queue.shards

    def enqueue(self, request: Request) -> None:
        """A request joins the queue."""
        self.queue.enqueue(request)

    def fork(self, request: Request, new: Request) -> None:
        """The new request goes on from what another has.

        Where that is in flight, the device is a token ahead of what requests know, and the new one
        comes from what is cached, like a request that waits.
        """
        flight = self.flight
        if flight is not None and request.slot >= 0 and request.slot in flight.slots:
            self.queue.enqueue(new)
        else:
            self.queue.fork(request, new)
        self._count_evicted()

    def end(self, request: Request) -> None:
        """A request that has a finish reason leaves slot or queue."""
        self._remove(request)
        self._drop_dead_flight()

    def preempt(self, request: Request) -> None:
        """A running request gives slot and blocks back and waits."""
        self._forget(request)
        self.queue.preempt(request)
        self._drop_dead_flight()

    def gauges(self, compiles: int, *, is_lost: bool) -> Gauges:
        """What holds now; where it `is_lost` since a call raised, all wait and nothing is held."""
        unit_bytes, counts = self.runner.unit_bytes, {"running": len(self.queue.running)}
        shards = [shard_gauges(manager, unit_bytes) for manager in self.shards.managers]
        if is_lost:
            shards = [idle_gauges(self.runner.plan, unit_bytes)] * len(shards)
            counts = {"running": 0, "waiting": self.metrics.unfinished}
        return Gauges.of(shards, compiles=compiles, **{"waiting": len(self.queue.waiting)} | counts)

    def restart(self, requests: Sequence[Request]) -> None:
        """Everything is empty, and the unfinished requests wait, as they are."""
        self.flight = self._reading = self.seals = None
        self._evicted_before = (self.metrics.evicted_blocks, self.metrics.evicted_snapshots)
        self.runner.rebuild()
        self.queue.restart(self.new_shards(), requests)

    def serve(self, alone: Request | None = None, *, returns: bool = True) -> Sequence[Token]:
        """Serves every running request once, or one alone if it has a slot; see `Engine.step`.

        Args:
          alone: whom it serves alone; None is nobody.
          returns: the caller gets the tokens; else streams and completions alone have them.
        """
        flight, self.alone, self._returns = self.flight, None, returns
        if flight is None:
            self.alone = alone
            flight = self.flight = self._launch_known()
        if flight is None:
            self._count_evicted()
            return []
        following, was_read = None, flight.result is not None
        if self.plan.overlap and alone is None and not was_read:
            try:
                outlook = self.look_ahead(flight)
                following = None if outlook is None else self._launch(outlook, flight)
            except DrawError as error:  # nothing was launched
                self._fail(error)
        self.flight = following
        if not was_read:
            self._read(flight, following, works=True)
        tokens = self._give(flight)
        if following is not None and following.read is None:
            self._launch_draws(following)
        if was_read and alone is None:  # else the caller would have two steps' tokens at once
            self.flight = self._launch_known()
        self._drop_dead_flight()
        self._count_evicted()
        if self.options.debug:
            self._verify()
        return tokens

    def drain(self) -> None:
        """Reads and counts the step in flight, if there is one.

        Its tokens are drawn with the next `step`: until then requests are what they were.
        """
        if self.flight is not None and self.flight.result is None:
            self._read(self.flight, None, works=False)

    def verify(self) -> Report:
        """Checks the whole cache, against the last check too; see `verify_cache`."""
        self.drain()
        self.tell(None)
        scan = self.runner.devices.scan()
        report = verify_scan(self.runner.cache, scan, self.shards.ledgers(), self.seals)
        return report.beside(self.host.problems() if self.host else ())

    def new_shards(self) -> DataShards:
        """Shards without requests, and copies to the host where there are any."""
        runner = self.runner
        kinds = {"cache_format": runner.cache_format, "poison": self.options.debug}
        shards = DataShards.planned(self.plan.data_shards, runner.config, runner.plan, **kinds)
        calls = {"apply": lambda: self.tell(self.flight, self._reading)}
        calls |= {"clock": self.clock, "metrics": self.metrics}
        self.host = make_host_copies(self.plan, runner.devices, shards, self.host, **calls)
        return shards

    def tell(self, *flights: Flight | None) -> None:
        """Tells the devices what has changed, beside steps in flight; what gives way is copied."""
        self._keep_evicted()
        slots = [one.slots for one in flights if one is not None]
        self.runner.apply(self.queue.shards, np.concatenate(slots) if slots else ())

    def _keep_evicted(self) -> None:
        """What gave way is copied to the host, if that keeps it, before anything writes there."""
        if self.host is not None:
            self.host.keep()

    def _bring(self, slot: int, rows: CachedRows) -> None:
        """Gives a slot the rows that its request came with, before anybody can copy from it."""
        self.tell(self.flight)
        put_request(self.runner.devices, self.shards, slot, rows)

    def _launch_known(self) -> Flight[StepResult] | None:
        """Launches a step of which the host knows every token; None if nobody runs.

        Requests that cannot draw end before it, and it is planned without them.
        """
        while True:
            self.queue.admit(self.alone)
            self.queue.reserve()
            alone = self.alone
            if alone is not None and alone.slot < 0:  # there is no room for it now
                self.alone = None
                continue
            running = self.queue.table
            if not running:
                if self.host is not None and self.host.wait():
                    continue
                return None
            if alone is not None:
                running = Running({alone.slot: alone}, running.known)
            running, lengths = self.runner.fitting(running), self.queue.shards.length_tokens
            outlook = look(running, lengths, None, draft_tokens=self.options.draft_tokens)
            try:
                return self._launch(outlook, None)
            except DrawError as error:  # nothing was launched
                self._fail(error)

    def look_ahead(self, flight: Flight[StepResult]) -> Outlook | None:
        """What the step after the one in flight begins with, whose tokens are on the device.

        None where that has to wait for the host: for what requests with grammars have drawn, if all
        steps draw at once, for a prompt whose samples part before its last token, for blocks that
        somebody must give back, for counts that find no room together, or since nobody goes on.
        """
        self.queue.admit()
        running = self.queue.table
        waits = self.runner.fitting(running) is not running
        if waits or [one for one in running.with_siblings if one.followers]:
            return None
        lengths, draft_tokens = self.queue.shards.length_tokens, self.options.draft_tokens
        outlook = look(running, lengths, flight, draft_tokens=draft_tokens)
        is_plain = self.plan.step_sizes.is_plain
        waits = running.is_constrained and not is_plain and outlook.waits.any()
        if waits or not outlook.goes_on.any() or not self.queue.reserve_ahead(outlook.num_known):
            return None
        return outlook

    def _launch(self, outlook: Outlook, flight: Flight | None) -> Flight[StepResult] | None:
        """Plans a step and launches it, behind the one in flight if there is one.

        Where its draws depend on what that one draws, they are left out, for `_launch_draws`. None
        where it is better launched when that has ended.
        """
        runner, running, shards = self.runner, outlook.running, self.queue.shards
        if flight is not None and outlook.repeats and self.options.steps_per_call == 1:
            plan, places = flight.plan, flight.places
        else:
            several = self.options.steps_per_call > 1 and runner.makes_several_steps(running)
            plan, places = make_plan(outlook, self.plan, self.pace, makes_several=several)
        launched_s, load = self.clock(), None
        if plan.holds_prompts:
            load = CallLoad.of(plan, outlook.lengths[places])
            if flight is not None and self.pace.waits(plan, load):
                return None
        draws_later = running.is_constrained and bool(outlook.waits[places[plan.rows.draws]].any())
        if not draws_later:
            runner.bring_masks(plan.rows, running)  # it may raise, and first
        elif not plan.is_plain:
            return None
        num_slots = shards.num_slots
        lengths, is_fed = np.zeros(num_slots, np.int32), np.zeros(num_slots, bool)
        lengths[running.slots] = outlook.lengths
        is_fed[running.slots] = outlook.is_fed
        self.tell(flight)
        boundaries = []
        self.metrics.rested_tokens += note_rests(plan, outlook, places, self._undo)
        if not plan.is_plain:
            boundaries = find_crossed(plan, outlook, places, flight, shards)
            self._keep_evicted()
        read = runner.run(plan, running, lengths, boundaries, is_fed, draws_later)
        if plan.is_plain and (boundaries := find_reached(plan, outlook, places, shards)):
            self._keep_evicted()
            runner.save(boundaries)
        return Flight(plan, running, places, boundaries, read, launched_s, load)

    def _launch_draws(self, flight: Flight[StepResult]) -> None:
        """Launches what is left of a step, now that the tokens of the one before are known."""
        while flight.read is None:
            try:
                flight.read = self.runner.run_draws(flight.plan, flight.running, flight.alive)
            except DrawError as error:
                self._fail(error)

    def _read(self, flight: Flight[StepResult], following: Flight | None, *, works: bool) -> None:
        """Reads a step, counts what it did, and shares full blocks; `following` runs already.

        Until the devices have made it the host `works` for who waits.
        """
        waited_from_s = self.clock()
        if works and (self.queue.waiting or (self.host and self.host.fetches)):
            back = int(following is not None and following.read is not None)
            self._reading = flight
            self.queue.work(functools.partial(self.runner.devices.is_ready, back))
            self._reading = None
        assert flight.read is not None, "its draws are launched by the step before"
        result = flight.read()
        flight.read_s = self.clock()
        self.pace.learn(flight, waited_from_s)
        self.metrics.steps += flight.plan.num_steps
        self.metrics.step_calls += 1
        count_appended(flight, result.num_kept, result.token_ids, self.queue)
        if result.num_drafts is not None and result.num_accepted is not None:
            slots = flight.slots
            self.metrics.count_drafts(result.num_drafts[slots], result.num_accepted[slots])
        self.metrics.snapshots += keep_written(flight, following, self.queue.shards)
        flight.result = result

    def _give(self, flight: Flight[StepResult]) -> Sequence[Token]:
        """Hands out the tokens of a step that has been read."""
        result, drawing = flight.result, (flight.alive & flight.rows.draws).nonzero()[0]
        assert result is not None
        slots, drawn = flight.rows.slots[drawing], (result, flight.read_s)
        rows = flight.running, flight.places[drawing], slots
        hand_out = HandOut(*rows, *drawn, self.metrics, self._undo)
        if not self._returns:
            hand_out.note_unreturned()
        tokens = hand_out.run(self.texts)
        if self.flight is None and self.options.draft_tokens:
            drafts = result.draft_token_ids[slots].tolist()
            for request, its_drafts in zip(hand_out.requests, drafts, strict=True):
                request.drafts = its_drafts
        for request in hand_out.ended:
            self._remove(request)
        return tokens

    def _fail(self, error: DrawError) -> None:
        """A request that cannot draw ends."""
        assert error.request.finish_reason is None, "no masks are made for who has ended"
        self._undo.save(error.request)
        error.request.finish_reason, error.request.error = "error", error.cause
        self._remove(error.request)

    def _forget(self, request: Request) -> None:
        """A request leaves its slot: nobody waits for its row of the step in flight."""
        if self.flight is not None and request.slot >= 0:
            self.flight.forget(request.slot)

    def _drop_dead_flight(self) -> None:
        """Nobody reads a step in flight whose rows are all of requests that have left."""
        flight = self.flight
        if flight is not None and not flight.alive.any():
            self.flight = None
            for boundary in flight.boundaries:
                manager, _ = self.shards.of(boundary.slot)
                manager.prefixes.drop_snapshot(boundary.place)

    def _remove(self, request: Request) -> None:
        self._forget(request)
        self.queue.remove(request)
        if request.siblings:  # they would keep each other, and their grammar, for the collector
            self._undo.save(request)
            request.siblings = ()
        reason, finished = request.finish_reason or "error", self.metrics.finished
        self.metrics.finished = finished | {reason: finished.get(reason, 0) + 1}

    def _verify(self) -> None:
        report = self.verify()
        self.seals = report.seals
        if report.problems:
            raise CacheError(str(report))

    def _count_evicted(self) -> None:
        """Blocks and snapshots, those of managers that were lost included."""
        now, before = self.queue.shards.num_evicted, self._evicted_before
        self.metrics.evicted_blocks = before[0] + now[0]
        self.metrics.evicted_snapshots = before[1] + now[1]
