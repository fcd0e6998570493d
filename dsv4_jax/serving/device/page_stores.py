"""PageStores: what the prefix trees let go, on its way to the host.

    tree ── Leaving ──> take_rows ──> copy, in a thread ──> HostTier

What leaves is packed before anything can write over it, since the device runs launches in order.
Packed rows are memory of the device, which is bounded: who needs more blocks at once than can be
copied gets them in portions, and waits. Who runs never does.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import operator
from collections.abc import Sequence

import numpy as np

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.host_tier import HostTier, Page
from dsv4_jax.allocator.prefix_tree import Leaving
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.page_memory import PageMemory, padded_rows, run_sizes
from dsv4_jax.serving.metrics.metrics import Metrics

MOST_STORING_BYTES = 2**28
"""Rows on their way to the host, in memory of the device. What leaves beyond is lost."""

_SHARE_AHEAD = 0.5
"""Of it, what blocks of a request that waits may take; the rest is for those that run."""


@dataclasses.dataclass(eq=False)
class _Run:
    """Rows on their way, of so many bytes, and the pages that they fill."""

    future: concurrent.futures.Future[None]
    pages: list[Page]
    num_bytes: int


class PageStores:
    """Copies to the host, of an engine on one process.

    Attributes:
      tier: the pages.
    """

    def __init__(
        self,
        devices: EngineArrays,
        shards: DataShards,
        tier: HostTier,
        memory: PageMemory,
        metrics: Metrics,
    ) -> None:
        """Makes the trees say what they let go.

        Args:
          devices: the arrays.
          shards: who holds which block.
          tier: empty.
          memory: of pages.
          metrics: counts.
        """
        self.tier = tier
        self._devices, self._shards, self._memory = devices, shards, memory
        self._metrics = metrics
        self._runs: list[_Run] = []
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "host-cache-store")
        for manager in shards.managers:
            manager.prefixes.tree.leaving = []

    @property
    def begun(self) -> list[concurrent.futures.Future[None]]:
        """Copies that have not been counted as ended."""
        return [run.future for run in self._runs]

    def keep(self) -> None:
        """Begins to copy what has left the trees; before anything that may write over it."""
        self._end_runs()
        for shard, manager in enumerate(self._shards.managers):
            leaving, manager.prefixes.tree.leaving = manager.prefixes.tree.leaving or [], []
            # The end of a prefix leaves first, and is of no use without the beginning: where not
            # all find a place, that goes before it, and is the last used in the end.
            runs: list[tuple[int, str, list[Leaving]]] = []
            for of in ("snapshots", "blocks"):
                rows = [
                    one
                    for one in reversed(leaving)
                    if one.of == of and not self.tier.has(of, one.content.key)
                ]
                size = run_sizes(self._devices.bytes_of_row(of))[-1]
                for start in range(0, len(rows), size):
                    runs.append((start, of, rows[start : start + size]))
            for _, of, rows in sorted(runs, key=operator.itemgetter(0)):
                self._store(of, shard, rows)
            self.tier.use((one.of, one.content) for one in leaving)

    def make_room(self, shard: int, num_blocks: int) -> bool:
        """Whether so many blocks can be taken now, and all that gives way for them be copied.

        Where they cannot, as many give way as can be copied.
        """
        manager = self._shards.managers[shard]
        each = sum(self._devices.bytes_of_row(of) for of in ("blocks", "snapshots"))
        while True:
            self.keep()
            missing = num_blocks - (manager.num_free_blocks - manager.num_cached_blocks)
            under_way = sum(run.num_bytes for run in self._runs)
            fitting = max(int(MOST_STORING_BYTES * _SHARE_AHEAD - under_way) // each, 0)
            fitting = fitting or not under_way
            if missing <= fitting:
                return True
            if not fitting:
                return False
            if not manager.evict(fitting):
                return True

    def close(self) -> None:
        """Copies that have not begun never will."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _store(self, of: str, shard: int, rows: Sequence[Leaving]) -> None:
        size, before = self._devices.bytes_of_row(of), self.tier.evicted_bytes
        if sum(run.num_bytes for run in self._runs) + size * len(rows) > MOST_STORING_BYTES:
            self._metrics.host_lost_bytes += size * len(rows)
            return
        added = [(one.row, self.tier.add(of, one.content, one.parent, size)) for one in rows]
        self._metrics.host_evicted_bytes += self.tier.evicted_bytes - before
        pages = [page for _, page in added if page is not None]
        if not pages:
            return
        numbers = np.array([row for row, page in added if page is not None], np.int32)
        numbers = padded_rows(self.through(of, shard, numbers))
        packed = self._devices.take_rows(of, numbers)

        def fill() -> None:
            for page, filled in zip(pages, self._memory.to_host(packed, len(pages)), strict=True):
                page.data, page.checksum = filled

        future = self._thread.submit(fill)
        for page in pages:
            page.filling = future
        self._runs.append(_Run(future, pages, size * len(pages)))
        self._metrics.host_stored_bytes += size * len(pages)

    def _end_runs(self) -> None:
        """Pages that are filled may give way; those that could not be are taken out."""
        for run in [one for one in self._runs if one.future.done()]:
            self._runs.remove(run)
            for page in run.pages:
                page.filling = None
                if run.future.exception() is not None:
                    self.tier.drop(page)
                    self._metrics.host_lost_bytes += page.num_bytes
            self.tier.let_go(run.pages)

    def through(self, of: str, shard: int, rows: np.ndarray) -> np.ndarray:
        """Rows of a shard, numbered through all; -1 stays."""
        devices = self._devices
        every = devices.cache.num_blocks if of == "blocks" else devices.store.num_snapshots
        offset = shard * (every // len(self._shards.managers))
        return np.where(rows < 0, rows, rows + offset).astype(np.int32)
