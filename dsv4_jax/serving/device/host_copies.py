"""HostCopies: what the prefix tree lets go moves to the host, and back for who asks for it.

    tree ── Leaving ──> pack_rows ──> copy, in a thread ──> HostTier
    HostTier ──> rows of a run, in a thread ──> device ──> unpack_rows ──> tree, as a prefix hit

No step waits for a copy. What leaves is packed before anything can write over it, since the device
runs launches in order. A request whose prefix lies on the host is left out of admission until its
copies have come, and then admitted like any other; others are admitted meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import operator
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.host_tier import HostTier, Page
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.prefix_tree import Leaving, PrefixNode, contents_of
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.request_rows import MOST_ROWS, padded_rows
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.requests.request import Request

MOST_STORING = 4
"""Runs on their way to the host. What leaves while there are so many is gone: a run is memory of
the device, too."""

MOST_LOADING = 8
"""Runs on their way to the device, of all requests: they are memory of the device, too."""

_FETCHING = 4
"""Threads that copy them."""


@dataclasses.dataclass(eq=False)
class _Run:
    """Pages of one kind, in order, for the device.

    `filled` are what some of them wait for, and `packed` is None until it is their turn.
    """

    of: str
    pages: list[Page]
    filled: list[concurrent.futures.Future[None]]
    packed: concurrent.futures.Future[jax.Array] | None = None


@dataclasses.dataclass(eq=False)
class _Fetch:
    """A prefix on its way back: runs of blocks, then of a snapshot, and the nodes that are used.

    `num_tokens` are those that it spares.
    """

    request: Request
    shard: int
    runs: list[_Run]
    chain: list[PrefixNode]
    num_tokens: int
    started_s: float


class HostCopies:
    """Copies of an engine on one process, for the prefix trees of all its data shards.

    Attributes:
      tier: the pages.
    """

    def __init__(
        self,
        devices: EngineArrays,
        shards: DataShards,
        max_bytes: int,
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
          apply: tells the devices what the managers have changed, after `keep`.
          metrics: counts.
          clock: gives seconds.
        """
        self.tier = HostTier(max_bytes)
        self._devices, self._shards, self._apply = devices, shards, apply
        self._metrics, self._clock = metrics, clock
        self._filling: dict[Page, concurrent.futures.Future[None]] = {}
        self._storing: list[tuple[concurrent.futures.Future[None], list[Page]]] = []
        self._fetches: dict[Request, _Fetch] = {}
        self._tried: set[Request] = set()
        # One that stores must not keep one that fetches waiting.
        self._storer = concurrent.futures.ThreadPoolExecutor(1, "host-cache-store")
        self._fetcher = concurrent.futures.ThreadPoolExecutor(_FETCHING, "host-cache-fetch")
        for manager in shards.managers:
            manager.prefixes.tree.leaving = []

    def keep(self) -> None:
        """Begins to copy what has left the trees; before anything that may write over it."""
        self._end_stores()
        for shard, manager in enumerate(self._shards.managers):
            leaving, manager.prefixes.tree.leaving = manager.prefixes.tree.leaving or [], []
            # The end of a prefix leaves first, and is of no use without the beginning: where not
            # all find a place, that goes before it, and is the last used in the end.
            runs: list[tuple[int, str, list[Leaving]]] = []
            for of in ("snapshots", "blocks"):
                rows = [one for one in reversed(leaving) if one.of == of]
                for start in range(0, len(rows), MOST_ROWS):
                    runs.append((start, of, rows[start : start + MOST_ROWS]))
            for _, of, rows in sorted(runs, key=operator.itemgetter(0)):
                self._store(of, shard, rows)
            self.tier.use((one.of, one.content) for one in leaving)

    def is_fetching(self, request: Request) -> bool:
        """Whether a request waits for its copies."""
        return request in self._fetches

    def begin(
        self, request: Request, shard: int, token_ids: np.ndarray, salt: bytes, max_tokens: int
    ) -> bool:
        """Begins to bring a longer prefix back than the tree can resume; whether it does.

        It is tried once, while a request waits.

        Args:
          request: who waits.
          shard: where it will be admitted.
          token_ids: i32[n], what it knows.
          salt: its salt.
          max_tokens: as in `KVCacheManager.admit`.
        """
        self.keep()  # who was admitted a moment ago may have pushed out what this one wants
        if request in self._tried or not self.tier.num_pages:
            return False
        self._tried.add(request)
        prefixes = self._shards.managers[shard].prefixes
        most = min(max(len(token_ids) - 1, 0), max_tokens)
        resumable = len(prefixes.find_resumable(token_ids, salt, max_tokens))
        chain = prefixes.tree.match(token_ids[:most], salt)
        blocks: list[Page] = []
        best: tuple[int, Page | None] = (resumable, None)
        for number, (content, parent) in enumerate(
            contents_of(token_ids[:most], salt, prefixes.tree.block_tokens)
        ):
            if number >= len(chain):
                page = self.tier.find("blocks", content, parent)
                if page is None:
                    break
                blocks.append(page)
            if snapshot := self.tier.find("snapshots", content, parent):
                best = (number + 1, snapshot)
        length, snapshot = best
        if snapshot is None or length <= resumable:
            return False
        chain, blocks = chain[:length], blocks[: max(length - len(chain), 0)]
        self.tier.hold([*blocks, snapshot])
        for node in chain:
            prefixes.tree.use(node)
        runs = [
            self._run("blocks", blocks[start : start + MOST_ROWS])
            for start in range(0, len(blocks), MOST_ROWS)
        ]
        runs.append(self._run("snapshots", [snapshot]))
        more = (length - resumable) * prefixes.tree.block_tokens
        self._fetches[request] = _Fetch(request, shard, runs, chain, more, self._clock())
        self._load_next()
        return True

    def poll(self) -> None:
        """Gives the trees what has come; waits for nothing."""
        for fetch in list(self._fetches.values()):
            while fetch.runs and (packed := fetch.runs[0].packed) is not None and packed.done():
                if not self._bring_back(fetch, packed):
                    break
            if not fetch.runs and fetch.request in self._fetches:
                self._metrics.host_hit_tokens += fetch.num_tokens
                self._end(fetch)
        self._load_next()

    def wait(self) -> bool:
        """Where nothing else is to do: waits for a copy; whether somebody waits for any."""
        firsts = [fetch.runs[0].packed for fetch in self._fetches.values()]
        begun = [packed for packed in firsts if packed is not None]
        concurrent.futures.wait(begun, return_when=concurrent.futures.FIRST_COMPLETED)
        return bool(firsts)

    def close(self) -> None:
        """Copies that have not begun never will; who has the engine makes new ones."""
        for pool in (self._storer, self._fetcher):
            pool.shutdown(wait=False, cancel_futures=True)

    def forget(self, request: Request) -> None:
        """A request has a slot, or does not wait any more."""
        self._tried.discard(request)
        if fetch := self._fetches.get(request):
            self._give_up(fetch)

    def _store(self, of: str, shard: int, rows: Sequence[Leaving]) -> None:
        if len(self._storing) >= MOST_STORING:
            return
        size, before = self._devices.bytes_of_row(of), self.tier.evicted_bytes
        added = [(one.row, self.tier.add(of, one.content, one.parent, size)) for one in rows]
        self._metrics.host_evicted_bytes += self.tier.evicted_bytes - before
        pages = [page for _, page in added if page is not None]
        if not pages:
            return
        numbers = np.array([row for row, page in added if page is not None], np.int32)
        packed = self._devices.take_rows(of, padded_rows(self._through(of, shard, numbers)))
        packed.copy_to_host_async()
        future = self._storer.submit(_fill, packed, pages)
        self._filling |= dict.fromkeys(pages, future)
        self._storing.append((future, pages))
        self._metrics.host_stored_bytes += size * len(pages)

    def _end_stores(self) -> None:
        """Pages that are filled may give way; those that could not be are taken out."""
        for future, pages in [one for one in self._storing if one[0].done()]:
            self._storing.remove((future, pages))
            for page in pages:
                del self._filling[page]
                if future.exception() is not None:
                    self.tier.drop(page)
            self.tier.let_go(pages)

    def _run(self, of: str, pages: list[Page]) -> _Run:
        filled = [self._filling[page] for page in pages if page in self._filling]
        return _Run(of, pages, filled)

    def _load_next(self) -> None:
        """Begins runs of those who wait, in turn, while no more than so many are on their way."""
        begun = {
            fetch: sum(run.packed is not None for run in fetch.runs)
            for fetch in self._fetches.values()
        }
        while sum(begun.values()) < MOST_LOADING:
            left = [fetch for fetch, count in begun.items() if count < len(fetch.runs)]
            if not left:
                return
            fetch = min(left, key=begun.__getitem__)  # of several the oldest
            run = fetch.runs[begun[fetch]]
            run.packed = self._fetcher.submit(_gather, run.pages, run.filled)
            begun[fetch] += 1

    def _bring_back(self, fetch: _Fetch, packed: concurrent.futures.Future[jax.Array]) -> bool:
        """Gives the tree the first run of a fetch, which has come; False ends it."""
        manager, run = self._shards.managers[fetch.shard], fetch.runs[0]
        failed = packed.exception()
        self._apply()  # hits that are pending may read what gives way now
        rows = [] if failed else self._take_rows(manager, fetch, run)
        self._apply()  # what gives way is copied, and poisoned, before it is written
        numbers = np.full(packed.result().shape[0] if not failed else 0, -1, np.int32)
        numbers[: len(rows)] = self._through(run.of, fetch.shard, np.array(rows, np.int32))
        if len(rows):
            self._devices.put_rows(run.of, numbers, packed.result())
        if len(rows) < len(run.pages):
            self._give_up(fetch)
            return False
        fetch.runs.pop(0)
        self.tier.let_go(run.pages)
        self._metrics.host_loaded_bytes += sum(page.data.nbytes for page in run.pages)
        return True

    def _take_rows(self, manager: KVCacheManager, fetch: _Fetch, run: _Run) -> list[int]:
        """Rows for the pages of a run that can be written, -1 for one that is there already."""
        prefixes, rows = manager.prefixes, []
        for page in run.pages:
            parent = fetch.chain[-1] if fetch.chain else None
            if run.of == "snapshots":
                if parent is None:
                    break
                place = prefixes.begin_snapshot() if parent.snapshot < 0 else -1
                if place >= 0:
                    prefixes.tree.put_snapshot(parent, place)
                rows.append(place)
                continue
            is_there = prefixes.tree.find_child(parent, page.content) is not None
            node = prefixes.bring_back(parent, page.content, len(fetch.chain))
            if node is None:
                break
            fetch.chain.append(node)
            rows.append(-1 if is_there else node.block)
        return rows

    def _end(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.request]
        tree = self._shards.managers[fetch.shard].prefixes.tree
        for node in reversed(fetch.chain):
            tree.leave(node)
        self._metrics.host_wait_s.add(self._clock() - fetch.started_s)

    def _give_up(self, fetch: _Fetch) -> None:
        for run in fetch.runs:
            if run.packed is not None:
                run.packed.cancel()
            self.tier.let_go(run.pages)
        fetch.runs = []
        self._end(fetch)

    def _through(self, of: str, shard: int, rows: np.ndarray) -> np.ndarray:
        """Rows of a shard, numbered through all; -1 stays."""
        devices = self._devices
        every = devices.cache.num_blocks if of == "blocks" else devices.store.num_snapshots
        offset = shard * (every // len(self._shards.managers))
        return np.where(rows < 0, rows, rows + offset).astype(np.int32)


def _fill(packed: jax.Array, pages: list[Page]) -> None:
    """In a thread: what the device packed, to the pages."""
    rows = np.asarray(packed)
    for page, row in zip(pages, rows, strict=False):
        page.data[:] = row


def _gather(pages: list[Page], filled: list[concurrent.futures.Future[None]]) -> jax.Array:
    """In a thread: pages, to the device in one copy, with as many rows as a program takes."""
    for future in filled:
        future.result()
    count = len(padded_rows(np.zeros(len(pages), np.int32)))
    rows = np.zeros((count, pages[0].data.nbytes), np.uint8)
    for row, page in zip(rows, pages, strict=False):
        row[:] = page.data
    return jax.block_until_ready(jax.device_put(rows))
