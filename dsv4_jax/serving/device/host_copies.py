"""HostCopies: prefixes that lie on the host or a disk move back for who asks for them.

    HostTier, files ──> slabs of a run, in a thread ──> device ──> unpack_rows ──> tree, as a hit

No step waits for a copy, nor for more than a millisecond of looking up and writing down; more of
that is done while the host would wait for a step. A request whose prefix lies on the host is left
out of admission until its copies have come, and then admitted like any other; others are admitted
meanwhile. What has come for it stays until it is admitted, unless others need the room before. The
way there is `page_stores`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.host_tier import HostTier, Page
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.serving.device.disk_shape import open_disk
from dsv4_jax.serving.device.disk_writes import DiskWrites
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.far_fetch import FarSearch, Fetch
from dsv4_jax.serving.device.far_pages import AnyPage, DamagedError, runs_of
from dsv4_jax.serving.device.far_places import FarPlaces
from dsv4_jax.serving.device.hosted_arrays import follows
from dsv4_jax.serving.device.page_moves import make_moves
from dsv4_jax.serving.device.page_stores import PageStores
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.sizing import EnginePlan

_log = logging.getLogger(__name__)

MOST_LOADING = 16
"""Runs on their way to the device, of all requests: they are memory of the device, too."""

_LOOKED_UP_TOGETHER = 64
"""Blocks, between two looks at the clock."""

STEP_S = 1e-3
"""Seconds that the work for prefixes may take beside each step of requests that run, before the
next one is launched; more is done while the host would wait for the devices. It is never less than
for one run, or for the blocks above."""

_PAUSE_S = 2e-4
"""Between two looks at copies, while the host would wait for the devices anyway."""


def make_host_copies(
    plan: EnginePlan,
    devices: EngineArrays,
    shards: DataShards,
    before: HostCopies | None,
    **calls: Any,
) -> HostCopies | None:
    """Those of an engine's options, if there are any, in the place of those before.

    Of several processes process 0 alone has them, and tells the others. `before` is what there was,
    whose files are open already; `calls` are as of `HostCopies`.
    """
    if before is not None:
        before.close()
    disk = open_disk(plan, devices.params) if before is None else before.disk
    if follows(devices) or (disk is None and not plan.host_cache_bytes):
        return None
    return HostCopies(devices, shards, plan.host_cache_bytes, disk, **calls)


class HostCopies:
    """Copies of an engine, for the prefix trees of all its data shards.

    Attributes:
      tier: the pages.
      moves: between them and the devices.
      disk: those in files; None if there are none.
      stores: copies to the host.
      fetches: by request, what comes back for it; `followed`: another's, for which it waits.
    """

    def __init__(
        self,
        devices: EngineArrays,
        shards: DataShards,
        max_bytes: int,
        disk: DiskTier | None = None,
        *,
        apply: Callable[[], None],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Starts with nothing on the host, and makes the trees say what they let go.

        Args:
          devices: the arrays.
          shards: who holds which block.
          max_bytes: of pages.
          disk: pages in files, open.
          apply: tells the devices what the managers have changed, after `keep`.
          metrics: counts.
          clock: gives seconds.
        """
        self.tier, self.moves = make_moves(devices, max_bytes, disk)
        self._devices, self._shards, self._apply = devices, shards, apply
        self._metrics, self._clock, self.disk = metrics, clock, disk
        self._places = FarPlaces(self.tier, disk, devices.bytes_of_row)
        writes = None if disk is None else DiskWrites(disk, self.tier, metrics)
        self.stores = PageStores(devices, shards, self.tier, self.moves, writes, metrics)
        self.fetches: dict[Request, Fetch] = {}
        self.followed: dict[Request, Fetch] = {}
        self._tried: set[Request] = set()
        self._waits_for_room, self._warned = False, set[str]()
        self._until_s, self._num_done = math.inf, 0  # portions
        self.keep = self.stores.keep

    @property
    def tiers(self) -> dict[str, HostTier | DiskTier]:
        """By name, the nearest first."""
        return {"host": self.tier} | ({} if self.disk is None else {"disk": self.disk})

    def is_fetching(self, request: Request) -> bool:
        """Whether a request waits for its copies, or for another's of the same pages."""
        fetch = self.fetches.get(request)
        return request in self.followed or (fetch is not None and fetch.is_coming)

    def make_room(
        self, shard: int, tokens: HashedTokens | None, salt: bytes, max_tokens: int
    ) -> bool:
        """Whether a request can take its blocks now, and all that gives way for them be copied."""
        manager = self._shards.managers[shard]
        chain = manager.prefixes.find_resumable(tokens, salt, max_tokens)
        needed = manager.plan.blocks_needed(max_tokens) - len(chain)
        has_room = self.stores.make_room(shard, len(chain), needed, chain)
        self._waits_for_room |= not has_room
        return has_room

    def give_way(self, oldest: Request | None) -> bool:
        """Lets go what is held for the youngest who waits, younger than `oldest`; whether any is.

        It is an ordinary prefix then, and what has not come never will.
        """
        ids = {one.request_id: one for one in self.fetches}
        youngest = ids[max(ids)] if ids else None
        if youngest is None or (oldest and youngest.request_id <= oldest.request_id):
            return False
        self._end(self.fetches[youngest])
        return True

    def begin(self, request: Request, shard: int, tokens: HashedTokens, max_tokens: int) -> bool:
        """Begins to bring a longer prefix back than the tree can resume; whether it does.

        It is tried once, while a request waits, or again when another's copies have come, which it
        waits for if they are of the same pages.

        Args:
          request: who waits.
          shard: where it will be admitted.
          tokens: what it knows.
          max_tokens: as in `KVCacheManager.admit`.
        """
        self.keep()  # who was admitted a moment ago may have pushed out what this one wants
        if self.disk is not None:
            self.disk.refresh()
        if request in self._tried or not (self.tier.num_pages or self.disk):
            return False
        self._tried.add(request)
        prefixes = self._shards.managers[shard].prefixes
        most = min(max(len(tokens) - 1, 0), max_tokens) // prefixes.tree.block_tokens
        resumable = len(prefixes.find_resumable(tokens, tokens.salt, max_tokens))
        chain = prefixes.tree.match(tokens, most)
        search = FarSearch(tokens, most, len(chain), resumable)
        if search.go_on(self._places, _LOOKED_UP_TOGETHER) and search.snapshot is None:
            return False
        prefixes.tree.use(*chain)
        fetch = self.fetches[request] = Fetch(request, shard, tokens, chain, self._clock(), search)
        self._hold_found(fetch, search, 0)
        self._look_up(fetch, search)
        self._load_next()
        return self.is_fetching(request)

    def _look_up(self, fetch: Fetch, search: FarSearch) -> None:
        """Goes on with a search while there is time, and begins what it has found."""
        while True:
            self._num_done += 1
            before = len(search.blocks)
            if search.go_on(self._places, _LOOKED_UP_TOGETHER):
                break
            self._hold_found(fetch, search, before)
            if time.perf_counter() > self._until_s:
                return
        tree = self._shards.managers[fetch.shard].prefixes.tree
        request, snapshot = fetch.request, search.snapshot
        if snapshot is None:
            self._end(fetch)
            return
        pages, keys = search.pages, set[tuple[str, bytes]]()
        for other in self.fetches.values():
            if other is fetch or other.shard != fetch.shard or not other.runs:
                continue
            keys = keys or {(page.of, page.content.key) for page in (snapshot, *pages)}
            if not other.keys.isdisjoint(keys):
                self._end(fetch)
                self.followed[request] = other
                return
        tree.leave(*fetch.chain[search.length :])
        del fetch.chain[search.length :]
        for of, wanted in (("blocks", pages), ("snapshots", [snapshot])):
            fetch.runs += runs_of(of, wanted, self._devices.bytes_of_row(of))
        for run in reversed(fetch.runs):
            self.tier.hold(run.slabs)
        self.tier.let_go(fetch.held)
        if self.disk is not None:
            runs = fetch.runs[-1], *fetch.runs[:-1]
            self.disk.use(page.file for run in runs for page in run.files)
        fetch.num_tokens = (search.length - search.resumable) * tree.block_tokens
        fetch.search, fetch.held = None, {}

    def _hold_found(self, fetch: Fetch, search: FarSearch, first: int) -> None:
        """What was found must be there when the search has ended."""
        found = [*search.blocks[first:], search.snapshot]
        slabs = {page.slab: None for page in found if page is not None}
        new = {slab: None for slab in slabs if slab is not None and slab not in fetch.held}
        self.tier.hold(list(new))
        fetch.held |= new

    def poll(self, *, is_busy: bool) -> None:
        """Gives the trees what has come, and waits for nothing.

        Args:
          is_busy: somebody runs, and would wait for work that takes longer than `STEP_S`.
        """
        self._go_on(STEP_S if is_busy else math.inf)

    def work(self, is_over: Callable[[], bool]) -> None:
        """While the host would wait for the devices: `poll` in portions, until it `is_over`."""
        while any(one.is_coming for one in self.fetches.values()) and not is_over():
            before = self._num_done
            self._go_on(0.0)
            if self._num_done == before:
                time.sleep(_PAUSE_S)

    def _go_on(self, seconds: float) -> None:
        """For so long, or for one portion; waits for nothing."""
        self._waits_for_room = False
        self._until_s = time.perf_counter() + seconds
        for fetch in list(self.fetches.values()):
            if fetch.search is not None:
                self._look_up(fetch, fetch.search)
            is_late = self._bring_what_came(fetch)
            if is_late:
                break
        self._load_next()

    def _bring_what_came(self, fetch: Fetch) -> bool:
        """Gives the tree runs of a fetch; whether there is no more time."""
        while fetch.runs and (packed := fetch.runs[0].packed) is not None and packed.done():
            num_new = len(fetch.runs[0].pages) if fetch.runs[0].of == "blocks" else 0
            if not self.stores.make_room(fetch.shard, len(fetch.chain), num_new):
                self._waits_for_room = True
                break
            if not self._bring_back(fetch, packed) or time.perf_counter() > self._until_s:
                break
        return time.perf_counter() > self._until_s

    def wait(self) -> bool:
        """Where nothing else is to do: waits for a copy; whether somebody waits for any."""
        firsts = [fetch.runs[0].packed for fetch in self.fetches.values() if fetch.runs]
        begun = [one for one in firsts if one is not None and not one.done()]
        awaited = [*begun, *(self.stores.begun if self._waits_for_room else [])]
        concurrent.futures.wait(awaited, return_when=concurrent.futures.FIRST_COMPLETED)
        is_searching = any(fetch.search is not None for fetch in self.fetches.values())
        return bool(firsts) or self._waits_for_room or is_searching

    def rest(self) -> None:
        """Nobody runs now: begins to bring to the disk what nobody uses, for some milliseconds."""
        self.settle(0.02)

    def settle(self, seconds: float | None) -> None:
        """Where nobody runs: brings to the disk what nobody uses; with None all, and the last."""
        if self.disk is not None:
            self.stores.settle(seconds)
            if seconds is None:
                self.disk.close()

    def problems(self) -> list[Problem]:
        """What is wrong with pages on the host and on the disk."""
        sizes = {of: self._devices.bytes_of_row(of) for of in ("blocks", "snapshots")}
        files = [] if self.disk is None else self.disk.damaged_files(sizes)
        of_host = self.tier.problems() + self.moves.problems()
        return of_host + [Problem("checksum", "disk", one) for one in files]

    def close(self) -> None:
        """Copies that have not begun never will; who has the engine makes new ones."""
        self.stores.close()

    def forget(self, request: Request) -> None:
        """A request has a slot, or does not wait any more."""
        self._tried.discard(request)
        self.followed.pop(request, None)
        if fetch := self.fetches.get(request):
            self._end(fetch)

    def _load_next(self) -> None:
        """Begins runs of those who wait, in turn, while no more than so many are on their way."""
        begun = {
            fetch: sum(run.packed is not None for run in fetch.runs)
            for fetch in self.fetches.values()
        }
        while sum(begun.values()) < MOST_LOADING:
            left = [fetch for fetch, count in begun.items() if count < len(fetch.runs)]
            if not left:
                return
            fetch = min(left, key=begun.__getitem__)  # of several the oldest
            run = fetch.runs[begun[fetch]]
            run.packed = self.moves.fetch(run)
            begun[fetch] += 1

    def _bring_back(self, fetch: Fetch, packed: concurrent.futures.Future[Any]) -> bool:
        """Gives the tree the first run of a fetch, which has come; False ends it."""
        self._num_done += 1
        manager, run = self._shards.managers[fetch.shard], fetch.runs[0]
        failed = packed.exception()
        self._apply()  # hits that are pending may read what gives way now
        rows = [] if failed else fetch.take_rows(manager.prefixes, run)
        self._apply()  # what gives way is copied, and poisoned, before it is written
        if rows:
            own = np.array(rows, np.int32)
            self.moves.put(run, self.stores.through(run.of, fetch.shard, own))
        if isinstance(failed, DamagedError):
            self._drop_damaged(failed.args)
        elif isinstance(failed, Exception) and not isinstance(failed, OSError):
            self._warn(f"a prefix could not be brought back, and is computed again: {failed!r}")
        if len(rows) < len(run.pages):
            self._end(fetch)
            return False
        fetch.runs.pop(0)
        self.tier.let_go(run.slabs)
        num_files, size = len(run.files), run.pages[0].num_bytes
        self._metrics.disk_loaded_bytes += num_files * size
        self._metrics.host_loaded_bytes += (len(run.pages) - num_files) * size
        if run.of == "blocks":
            # Whoever admits the request looks for all of them at once.
            manager.prefixes.tree.add_match(fetch.tokens, fetch.chain)
            fetch.file_tokens += num_files * manager.plan.block_tokens
        if not fetch.runs:
            from_disk = min(fetch.file_tokens, fetch.num_tokens)
            self._metrics.disk_hit_tokens += from_disk
            self._metrics.host_hit_tokens += fetch.num_tokens - from_disk
            self._metrics.host_wait_s.add(self._clock() - fetch.started_s)
            fetch.resumes = fetch.chain[-1]
            fetch.resumes.snapshot_holds += 1
            self._follow(fetch)
        return True

    def _drop_damaged(self, pages: Sequence[AnyPage]) -> None:
        """They are misses from now on, for everybody."""
        for page in pages:
            if isinstance(page, Page):
                self.tier.drop(page)
            elif self.disk is not None:
                self.disk.drop(page.file)
        self._metrics.damaged_pages += len(pages)
        is_of_host = any(isinstance(page, Page) for page in pages)
        if is_of_host:  # of a file the disk's tier has said it
            self._warn(
                "a page of a prefix came back with other bytes than it had left with, and is "
                "computed again; more are counted in damaged_pages alone"
            )

    def _warn(self, message: str) -> None:
        """Once about each thing."""
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message)

    def _end(self, fetch: Fetch) -> None:
        """Lets go all that is held for a request, whether it has come or not."""
        del self.fetches[fetch.request]
        for run in fetch.runs:
            self.moves.forget(run)
            self.tier.let_go(run.slabs)
        self.tier.let_go(fetch.held)
        if fetch.resumes is not None:
            fetch.resumes.snapshot_holds -= 1
        self._shards.managers[fetch.shard].prefixes.tree.leave(*fetch.chain)
        self._follow(fetch)

    def _follow(self, fetch: Fetch) -> None:
        """Who has waited for it looks what there is now."""
        for request in [one for one, other in self.followed.items() if other is fetch]:
            del self.followed[request]
            self._tried.discard(request)
