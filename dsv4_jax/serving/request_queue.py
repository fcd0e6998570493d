"""RequestQueue: who waits, who has a slot, and who gives way."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence

from dsv4_jax.allocator.manager import KVCacheManager, NoRoomError
from dsv4_jax.serving.calls import UndoLog
from dsv4_jax.serving.metrics import Metrics
from dsv4_jax.serving.request import Request
from dsv4_jax.serving.snapshot_policy import plan_request


class RequestQueue:
    """Requests in order of age, in slots and before them.

    Attributes:
      manager: who holds which slot and blocks.
      waiting: requests without a slot, oldest first.
      running: by slot.
    """

    def __init__(
        self, manager: KVCacheManager, *, draft_tokens: int, metrics: Metrics, undo: UndoLog
    ) -> None:
        """Starts without requests.

        Args:
          manager: without requests too.
          draft_tokens: k, drafts that a step may append beside the token it knows.
          metrics: counts admissions and preemptions.
          undo: where the change in progress saves what it changes of requests.
        """
        self.manager = manager
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self._draft_tokens = draft_tokens
        self._metrics = metrics
        self._undo = undo

    def restart(self, manager: KVCacheManager, requests: Sequence[Request]) -> None:
        """All unfinished requests wait; the manager is a new one."""
        for request in requests:
            request.slot, request.drafts = -1, []
        self.manager, self.running = manager, {}
        self.waiting = sorted(requests, key=lambda request: request.request_id)

    def by_age(self) -> list[Request]:
        """Running requests, the oldest first."""
        return sorted(self.running.values(), key=lambda request: request.request_id)

    def enqueue(self, request: Request) -> None:
        """A request joins those that wait, at the place of its age."""
        bisect.insort(self.waiting, request, key=lambda other: other.request_id)

    def fork(self, request: Request, new: Request) -> None:
        """The new request shares what a running one has; where that cannot be, it waits."""
        if request.slot >= 0 and self.manager.num_free_slots:
            length = int(self.manager.length_tokens[request.slot])
            self.manager.share(request.slot, request.known)
            try:
                slot = self.manager.fork(request.slot, max(self._wanted_tokens(new), length))
            except NoRoomError:
                slot = -1  # no blocks now
            if slot >= 0:
                new.drafts = list(request.drafts)
                self._start(new, slot)
                return
        self.enqueue(new)

    def remove(self, request: Request) -> None:
        """A request leaves its slot, or those that wait."""
        if request.slot >= 0:
            self._leave_slot(request)
        else:
            self.waiting = [other for other in self.waiting if other is not request]

    def preempt(self, request: Request) -> None:
        """A running request gives slot and blocks back and waits; its prefix may stay cached."""
        self._leave_slot(request)
        request.drafts = []
        self._metrics.preempted += 1
        self.enqueue(request)

    def admit(self) -> None:
        """Moves waiting requests to free slots, in order, while there is room for all to go on."""
        while self.waiting:
            request, wanted = self.waiting[0], self._wanted_tokens(self.waiting[0])
            prefix = (request.known, request.salt)
            if not self.manager.can_admit(wanted, *prefix, spare_blocks=len(self.running)):
                return
            known_tokens = self.manager.prefixes.known_tokens(*prefix)
            slot = self.manager.admit(wanted, *prefix)
            del self.waiting[0]
            self._start(request, slot)
            plan_request(request, self.manager, known_tokens)
            hit = self.manager.prefixes.hit_tokens(slot)
            self._metrics.hit_tokens += hit
            self._metrics.prefix_hits += hit > 0
            self._metrics.prefix_misses += hit == 0

    def reserve(self) -> None:
        """Blocks for what the next step appends; the youngest give theirs back if need be."""
        for request in self.by_age():
            while request.slot >= 0:
                try:
                    self.manager.extend(request.slot, self._wanted_tokens(request))
                    break
                except NoRoomError:
                    self.preempt(self.by_age()[-1])

    def _wanted_tokens(self, request: Request) -> int:
        """Tokens that a request needs blocks for now: those known, and those in flight."""
        return min(request.num_known + self._draft_tokens + 1, len(request.token_ids))

    def _start(self, request: Request, slot: int) -> None:
        self._undo.save(request)
        request.slot = slot
        self.running[slot] = request
        if request.admitted_s is None:
            request.admitted_s = time.perf_counter()
            self._metrics.queue_s.add(request.admitted_s - request.submitted_s)

    def _leave_slot(self, request: Request) -> None:
        self.manager.release(request.slot)
        del self.running[request.slot]
        request.slot = -1
