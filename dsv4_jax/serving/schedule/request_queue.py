"""RequestQueue: who waits, who has a slot, and who gives way."""

from __future__ import annotations

import bisect
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.manager import NoRoomError
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.requests.cached_rows import CachedRows
from dsv4_jax.serving.requests.calls import UndoLog
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.schedule.far_prefixes import FarPrefixes, NoFarPrefixes
from dsv4_jax.serving.schedule.known_tokens import KnownTokens
from dsv4_jax.serving.schedule.running import Running
from dsv4_jax.serving.schedule.snapshot_policy import plan_request, plan_restored
from dsv4_jax.serving.sizing import UpperSteps

_HASHED_AHEAD, _HASHED_TOGETHER = 2, 64
"""Requests that wait, of which blocks are hashed while the host would wait for the devices, and how
many blocks between two looks at those."""

_HASHED_A_STEP = 512
"""Blocks of prompts of those who wait, while others run; half a millisecond."""


class RequestQueue:
    """Requests in order of age, in slots and before them.

    Attributes:
      shards: who holds which slot and blocks.
      waiting: requests without a slot, oldest first.
      running: by slot.
      clock: gives seconds.
    """

    def __init__(
        self,
        shards: DataShards,
        *,
        step_tokens: int,
        metrics: Metrics,
        undo: UndoLog,
        clock: Callable[[], float] = time.perf_counter,
        bring: Callable[[int, CachedRows], None] = lambda slot, rows: None,
        far: Callable[[], FarPrefixes] = NoFarPrefixes,
        upper: UpperSteps | None = None,
    ) -> None:
        """Starts without requests.

        Args:
          shards: without requests too.
          step_tokens: the most that a call appends to a request that decodes.
          metrics: counts admissions and preemptions.
          undo: where the change in progress saves what it changes of requests.
          clock: seconds, of when requests are admitted.
          bring: gives a slot the rows that a request came with; the devices run that after all
            that was launched before.
          far: the prefixes that lie elsewhere, as they are now.
          upper: as of `EnginePlan`.
        """
        self.shards = shards
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self._step_tokens = step_tokens
        self._metrics = metrics
        self._undo = undo
        self.clock = clock
        self._bring, self._far = bring, far
        self._upper = upper
        self._table: Running | None = None
        num_slots = len(shards.length_tokens)
        self._known = KnownTokens(num_slots, shards.managers[0].plan.max_context_tokens)
        self._room = np.zeros(num_slots, np.int32)  # tokens, of each slot's blocks
        self._hashed: dict[Request, HashedTokens] = {}  # of those who wait

    @property
    def table(self) -> Running:
        """Running requests as they are now, the oldest first."""
        if self._table is None:
            self._table = Running(self.running, self._known)
        return self._table

    def restart(self, shards: DataShards, requests: Sequence[Request]) -> None:
        """All unfinished requests wait; the managers are new ones."""
        for request in requests:
            if request.slot >= 0:
                self._known.leave(request)
            request.slot, request.drafts = -1, []
        self._drop_table()
        self.shards, self.running, self._hashed = shards, {}, {}
        self.waiting = sorted(requests, key=lambda request: request.request_id)

    def by_age(self, shard: int | None = None) -> list[Request]:
        """Running requests, of all data shards or of one, the oldest first."""
        found = [
            request
            for slot, request in self.running.items()
            if shard is None or self.shards.shard_of(slot) == shard
        ]
        return sorted(found, key=lambda request: request.request_id)

    def enqueue(self, request: Request) -> None:
        """A request joins those that wait, at the place of its age."""
        bisect.insort(self.waiting, request, key=lambda other: other.request_id)

    def fork(self, request: Request, new: Request) -> None:
        """The new request shares what a running one has; where that cannot be, it waits."""
        if request.slot >= 0 and self._fork_slot(request, new):
            return
        self.enqueue(new)

    def _fork_slot(self, request: Request, new: Request) -> bool:
        """Whether the new request got a slot beside the running one, on its data shard."""
        manager, own = self.shards.of(request.slot)
        if not manager.num_free_slots:
            return False
        manager.share(own, request.known)
        length = self.shards.length_of(request.slot)
        try:
            slot = self.shards.fork(request.slot, max(self._wanted_tokens(new), length))
        except NoRoomError:
            return False  # no blocks now
        self._start(new, slot, length)
        new.drafts = list(request.drafts)
        new.next_boundary, new.snapshot_spacing = request.next_boundary, request.snapshot_spacing
        new.reading, new.upper_from = request.reading, request.upper_from
        return True

    def remove(self, request: Request) -> None:
        """A request leaves its slot, or those that wait."""
        if request.slot >= 0:
            self._leave_slot(request)
        else:
            self.waiting = [other for other in self.waiting if other is not request]
            self._far().forget(request)
            self._hashed.pop(request, None)
            if request.cached is not None:  # it may be gigabytes, and the request is kept
                self._undo.save(request)
                request.cached = None

    def preempt(self, request: Request) -> None:
        """A running request gives slot and blocks back and waits; its prefix may stay cached."""
        self._leave_slot(request)
        request.drafts = []
        self._metrics.preempted += 1
        self.enqueue(request)

    def admit(self, only: Request | None = None) -> None:
        """Moves waiting requests to free slots, in order, while there is room for all to go on.

        `DataShards.choose` says which data shard a request goes to. Of samples of one prompt one
        reads it, and the others wait for that. Whose prefix is on its way from elsewhere is left
        out until it has come, and whose prompt is hashed, in portions while others run, until then.
        With `only` no other request gets a slot.
        """
        far, is_busy = self._far(), bool(self.running)
        far.poll(is_busy=is_busy)
        if not self.waiting or not any(one.num_free_slots for one in self.shards.managers):
            return
        if only is None:
            self._fork_samples()
        left, late = _HASHED_A_STEP, set[Request]()
        while True:
            waiting = self.waiting if only is None else [o for o in self.waiting if o is only]
            ready = (one for one in waiting if one not in late and not far.is_fetching(one))
            request = next((one for one in ready if one.leader in (None, one)), None)
            if request is None:
                break
            wanted, hashed = self._wanted_tokens(request), self.hashed_of(request)
            if is_busy:
                before = len(hashed.contents)
                if not hashed.hash_more(left):
                    late.add(request)
                left -= len(hashed.contents) - before
                if request in late:
                    continue
            prefix = (None if request.cached else hashed, request.salt)
            spare = [len(self.by_age(shard)) for shard in range(len(self.shards.managers))]
            choose = functools.partial(self.shards.choose, wanted, *prefix, spare_blocks=spare)
            shard = choose()
            while shard is None and far.give_way(request):
                shard = choose()
            if shard is None:
                break
            if request.cached is None and far.begin(request, shard, hashed, wanted):
                continue
            if not far.make_room(shard, *prefix, wanted):
                break
            if request.cached is not None:
                self._settle(request, self.shards.admit(shard, wanted, *prefix), request.cached)
                continue
            prefixes = self.shards.managers[shard].prefixes
            known_tokens = prefixes.known_tokens(hashed, request.salt)
            slot = self.shards.admit(shard, wanted, *prefix)
            hit = self.shards.length_of(slot)
            self.waiting.remove(request)
            self._start(request, slot, hit)
            plan_request(request, self.shards, known_tokens, self._upper)
            self._metrics.hit_tokens += hit
            self._metrics.prefix_hits += hit > 0
            self._metrics.prefix_misses += hit == 0
        if only is None:
            self._fork_samples()

    def work(self, is_over: Callable[[], bool]) -> None:
        """While the devices are at work: hashes and brings prefixes for who waits, in portions.

        Args:
          is_over: whether there is no more time.
        """
        if any(manager.num_free_slots for manager in self.shards.managers):
            for hashed in map(self.hashed_of, self.waiting[:_HASHED_AHEAD]):
                while not is_over() and not hashed.hash_more(_HASHED_TOGETHER):
                    pass
        self._far().work(is_over)

    def _settle(self, request: Request, slot: int, rows: CachedRows) -> None:
        """A request that came with its cache goes on in a slot, whose blocks others may share."""
        manager, own = self.shards.of(slot)
        manager.advance(own, rows.length_tokens)
        self.waiting.remove(request)
        self._start(request, slot, rows.length_tokens)
        request.cached = None
        plan_restored(request, self.shards, rows.length_tokens, self._upper)
        self._bring(slot, rows)
        manager.share(own, request.known)

    def reserve(self) -> None:
        """Blocks for what the next step appends.

        If need be, what has come for those that wait gives way, and then the youngest of a data
        shard give theirs back.
        """
        table = self.table
        for request, wanted in self._lacking(table, table.num_known):
            while request.slot >= 0:
                try:
                    self._extend(request.slot, wanted)
                    break
                except NoRoomError:
                    if self._far().give_way(None):
                        continue
                    self.preempt(self.by_age(self.shards.shard_of(request.slot))[-1])

    def reserve_ahead(self, num_known: np.ndarray) -> bool:
        """Blocks for a step of which one part is not known yet; nobody gives way for it.

        Args:
          num_known: i32[n], the most tokens that each request of `table` may know then.

        Returns:
          Whether all blocks are there.
        """
        try:
            for request, wanted in self._lacking(self.table, num_known):
                self._extend(request.slot, wanted)
        except NoRoomError:
            return False
        return True

    def check_room(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Refuses lengths i32[n] for which slots i32[n] have no blocks: nothing reserved them."""
        beyond = lengths > self._room[slots]
        if beyond.any():
            raise ValueError(f"slots {slots[beyond]} have no blocks for {lengths[beyond]} tokens")

    def _lacking(self, table: Running, num_known: np.ndarray) -> list[tuple[Request, int]]:
        """Requests whose blocks do not hold what they want, and how many tokens that is."""
        wanted = np.minimum(num_known + self._step_tokens, table.totals)
        rows = np.flatnonzero(wanted > self._room[table.slots])
        return [(table.requests[row], int(wanted[row])) for row in rows.tolist()]

    def _extend(self, slot: int, wanted: int) -> None:
        manager, own = self.shards.of(slot)
        manager.extend(own, wanted)
        self._note_room(slot)

    def _note_room(self, slot: int) -> None:
        manager, own = self.shards.of(slot)
        held = np.count_nonzero(manager.block_table[own] >= 0)
        self._room[slot] = held * manager.plan.block_tokens

    def _fork_samples(self) -> None:
        """Where a prompt has been read but for its last token, its samples part."""
        for request in [one for one in self.table.with_siblings if not one.num_drawn]:
            if request.num_known - self.shards.length_of(request.slot) != 1:
                continue
            for sample in request.followers:
                if not self._fork_slot(request, sample):
                    break
                self.waiting.remove(sample)

    def _wanted_tokens(self, request: Request) -> int:
        """Tokens that a request needs blocks for now: those known, and those in flight."""
        return min(request.num_known + self._step_tokens, len(request.token_ids))

    def hashed_of(self, request: Request) -> HashedTokens:
        """What a request that waits knows, as it is looked up."""
        if request not in self._hashed:
            size = self.shards.managers[0].plan.block_tokens
            shares = request.cached is None and self.shards.managers[0].plan.num_snapshots
            known = request.known if shares else request.known[:0]
            self._hashed[request] = HashedTokens(known, request.salt, size)
        return self._hashed[request]

    def _start(self, request: Request, slot: int, length: int) -> None:
        """A request gets a slot, which holds its first tokens already."""
        self._undo.save(request)
        self._far().forget(request)
        self._hashed.pop(request, None)
        request.slot = slot
        self._known.enter(request, self._undo)
        self._drop_table()
        self.running[slot] = request
        self._note_room(slot)
        if request.admitted_s is None:
            request.hit_tokens = min(length, request.prompt_tokens)
            request.admitted_s = self.clock()
            self._metrics.queue_s.add(request.admitted_s - request.submitted_s)

    def _leave_slot(self, request: Request) -> None:
        manager, own = self.shards.of(request.slot)
        manager.release(own)
        self._drop_table()
        self._undo.save(request)
        self._known.leave(request)
        del self.running[request.slot]
        request.slot = -1
        if not self.running:
            self._far().rest()

    def _drop_table(self) -> None:
        if self._table is not None:
            self._undo.save_item(vars(self), "_table")
            self._table = None
