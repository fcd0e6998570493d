"""PageStores: what the prefix trees let go, on its way to the host, and from there to a disk.

    tree ── Leaving ──> take_rows ──> copy, in a thread ──> HostTier ──> file, in a thread

What leaves is packed before anything can write over it, since the device runs launches in order.
Packed rows are memory of the device, which is bounded: who needs more blocks at once than can be
copied gets them in portions, and waits. Who runs never does. With a disk, what nobody uses is
copied before it has to leave, so that a process that ends has written it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import operator
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.host_tier import HostTier, Slab
from dsv4_jax.allocator.leaving import Leaving, Room
from dsv4_jax.allocator.prefix_tree import PrefixNode
from dsv4_jax.serving.device.disk_writes import DiskWrites
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.page_memory import run_sizes
from dsv4_jax.serving.device.page_moves import PageMoves
from dsv4_jax.serving.metrics.metrics import Metrics

MOST_STORING_BYTES = 2**29
"""Rows on their way to the host, in memory of the device. What leaves beyond is lost."""

_SHARE_AHEAD = 0.75
"""Of it, what blocks of a request that waits may take; the rest is for those that run."""

_SHARE_UNUSED = 0.125
"""Of it, what nobody waits for may take, on its way to the disk."""


@dataclasses.dataclass(eq=False)
class _Run:
    """Rows on their way, of so many bytes, and the slabs that they fill.

    `is_ahead` says that they have not left the tree: the pages are there for the disk alone.
    """

    future: concurrent.futures.Future[None]
    slabs: list[Slab]
    num_bytes: int
    is_ahead: bool


class PageStores:
    """Copies to the host.

    Attributes:
      tier: the pages.
      writes: where they go from there; None if they stay.
    """

    def __init__(
        self,
        devices: EngineArrays,
        shards: DataShards,
        tier: HostTier,
        moves: PageMoves,
        writes: DiskWrites | None,
        metrics: Metrics,
    ) -> None:
        """Makes the trees say what they let go.

        Args:
          devices: the arrays.
          shards: who holds which block.
          tier: empty.
          moves: of pages.
          writes: where pages go from there, if they do.
          metrics: counts.
        """
        self.tier, self.writes = tier, writes
        self._devices, self._shards, self._moves = devices, shards, moves
        self._metrics = metrics
        self._runs: list[_Run] = []
        self._unused: list[collections.OrderedDict[PrefixNode, None]] = []
        for manager in shards.managers:
            self._unused.append(collections.OrderedDict())
            manager.prefixes.tree.leaving = []
            if writes is not None and writes.disk.is_writer:
                manager.prefixes.tree.unused = []

    @property
    def begun(self) -> list[concurrent.futures.Future[None]]:
        """Copies that have not been counted as ended."""
        return [run.future for run in self._runs]

    @property
    def begun_bytes(self) -> int:
        """Of their rows."""
        return sum(run.num_bytes for run in self._runs)

    def settle(self, seconds: float | None) -> None:
        """Where nobody runs: waits until all has come to the host, and with None to the disk too.

        Args:
          seconds: no longer than that.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            self.keep()
            begun: list[concurrent.futures.Future[Any]] = [*self.begun]
            if self.writes is not None and (seconds is None or any(self._unused)):
                begun += self.writes.begun
            left = None if until is None else until - time.monotonic()
            if not begun or (left is not None and left <= 0):
                return
            first = concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(begun, timeout=left, return_when=first)

    def keep(self) -> None:
        """Begins to copy what has left the trees; before anything that may write over it."""
        self._end_runs()
        self._moves.tell()
        if self.writes is not None:
            self.writes.move()  # before others take the place of what has come
        for shard, manager in enumerate(self._shards.managers):
            leaving, manager.prefixes.tree.leaving = manager.prefixes.tree.leaving or [], []
            if not leaving:
                continue
            # The end of a prefix leaves first, and is of no use without the beginning: where not
            # all find a place, that goes before it, and is the last used in the end.
            runs: list[tuple[int, str, list[Leaving]]] = []
            leaving.reverse()
            for of in ("snapshots", "blocks"):
                new = self.tier.lacking(of, [one for one in leaving if one[0] == of])
                rows = list({one[2][0]: one for one in reversed(new)}.values())[::-1]
                size = run_sizes(self._devices.bytes_of_row(of))[-1]
                for start in range(0, len(rows), size):
                    runs.append((start, of, rows[start : start + size]))
            for _, of, rows in sorted(runs, key=operator.itemgetter(0)):
                self._store(of, shard, rows)
            self.tier.use([(one[0], one[2][0]) for one in reversed(leaving)])
        if self.writes is not None:
            self._keep_unused(self.writes)

    def _keep_unused(self, writes: DiskWrites) -> None:
        """Begins to copy what nobody uses and the disk lacks, while there is room for it."""
        for shard, manager in enumerate(self._shards.managers):
            tree, unused = manager.prefixes.tree, self._unused[shard]
            if tree.unused:
                unused.update(dict.fromkeys(reversed(tree.unused)))
                tree.unused = []
            rows: dict[str, list[PrefixNode]] = {"blocks": [], "snapshots": []}
            room = int(MOST_STORING_BYTES * _SHARE_UNUSED) - writes.left_bytes
            room -= self.begun_bytes
            while unused and room > 0:
                node, _ = unused.popitem(last=False)
                for of in rows:
                    can_resume = node.snapshot >= 0 and not node.is_demoted
                    can_resume &= not node.must_follow
                    is_there = node.is_kept and (of == "blocks" or can_resume)
                    if not is_there or not writes.wants(of, node.key):
                        continue
                    page = self.tier.get(of, node.key)
                    room -= self._devices.bytes_of_row(of)
                    if page is None:
                        rows[of].append(node)
                    elif page.slab.filling is None:
                        writes.offer(page)
            for of, nodes in rows.items():
                size = run_sizes(self._devices.bytes_of_row(of))[-1]
                for start in range(0, len(nodes), size):
                    part = [node.leaving(of) for node in nodes[start : start + size]]
                    self._store(of, shard, part, is_ahead=True)
                # Who found no page, since all are held, comes again.
                fits = self._devices.bytes_of_row(of) <= self.tier.max_bytes
                for node in reversed(nodes) if fits else ():
                    if not self.tier.has(of, node.key):
                        unused[node] = None
                        unused.move_to_end(node, last=False)

    def make_room(
        self, shard: int, first: int, num_blocks: int, chain: Sequence[PrefixNode] = ()
    ) -> bool:
        """Whether blocks can be taken now, and all that gave way for them be copied.

        Where they cannot, as many give way as can be copied.

        Args:
          shard: of whoever takes them.
          first: the first one's number in the request.
          num_blocks: how many.
          chain: what must not give way, since whoever takes them is about to hit it.
        """
        manager, is_used = self._shards.managers[shard], False
        sizes = [self._devices.bytes_of_row(of) for of in ("blocks", "snapshots")]
        slab = run_sizes(sizes[0])[-1]
        try:
            while True:
                self.keep()
                missing = manager.prefixes.blocks_missing(first, num_blocks)
                if not missing:
                    return True
                under_way = self.begun_bytes
                left = int(MOST_STORING_BYTES * _SHARE_AHEAD) - under_way
                fitting = left // sizes[0]
                if under_way and fitting < min(missing, slab):
                    return False  # rather than in pieces of slabs
                if not is_used:
                    manager.prefixes.tree.use(*chain)
                    is_used = True
                if fitting >= slab:
                    fitting = fitting // slab * slab
                room = Room(max(left, sum(sizes)), *sizes)
                manager.evict(min(max(fitting, 1), missing), room)
        finally:
            if is_used:
                manager.prefixes.tree.leave(*chain)

    def close(self) -> None:
        """Copies that have not begun never will."""
        if self.writes is not None:
            self.writes.close()
        self._moves.close()

    def _store(
        self, of: str, shard: int, rows: Sequence[Leaving], *, is_ahead: bool = False
    ) -> None:
        size, before = self._devices.bytes_of_row(of), self.tier.evicted_bytes
        if self.begun_bytes + size * len(rows) > MOST_STORING_BYTES:
            self._metrics.host_lost_bytes += size * len(rows)
            return
        numbers = self.through(of, shard, np.array([one.row for one in rows], np.int32))
        slabs, taken = [], 0
        for part in reversed(run_sizes(size)):
            while len(rows) - taken >= part:
                there = self._moves.place_of(of, numbers[taken : taken + part])
                slab = self.tier.add(of, rows[taken : taken + part], size, *there)
                if slab is None:
                    break
                slabs.append(slab)
                taken += part
        self._metrics.host_evicted_bytes += self.tier.evicted_bytes - before
        if not slabs:
            return
        future = self._moves.store(of, numbers[:taken], slabs)
        for slab in slabs:
            slab.filling = future
        self._runs.append(_Run(future, slabs, size * taken, is_ahead))
        self._metrics.host_stored_bytes += size * taken

    def _end_runs(self) -> None:
        """Slabs that are filled may give way; those that could not be are taken out."""
        for run in [one for one in self._runs if one.future.done()]:
            self._runs.remove(run)
            has_failed = run.future.exception() is not None
            for slab in run.slabs:
                slab.filling = None
                for page in list(slab.pages) if has_failed or self.writes is not None else ():
                    if has_failed:
                        self.tier.drop(page)
                        self._metrics.host_lost_bytes += page.num_bytes
                    elif self.writes is not None:
                        self.writes.offer(page)
            self.tier.let_go(run.slabs)
            for slab in run.slabs if run.is_ahead else ():
                self.tier.demote(slab)

    def through(self, of: str, shard: int, rows: np.ndarray) -> np.ndarray:
        """Rows of a shard, numbered through all; -1 stays."""
        devices = self._devices
        every = devices.cache.num_blocks if of == "blocks" else devices.store.num_snapshots
        offset = shard * (every // len(self._shards.managers))
        return np.where(rows < 0, rows, rows + offset).astype(np.int32)
