"""DiskWrites: filled pages of the host, on their way to the disk in a thread."""

from __future__ import annotations

import collections
import concurrent.futures
import time

import numpy as np

from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.host_tier import HostTier, Page, Slab
from dsv4_jax.serving.metrics.metrics import Metrics

MOST_WRITING_BYTES = 2**27
"""Of pages that are being written, and are held for it."""


class DiskWrites:
    """Which pages of a host tier still have to be written.

    Attributes:
      disk: where they go.
    """

    def __init__(self, disk: DiskTier, tier: HostTier, metrics: Metrics) -> None:
        """Starts with none."""
        self.disk = disk
        self._tier, self._metrics = tier, metrics
        self._waiting: collections.OrderedDict[Page, None] = collections.OrderedDict()
        self._begun: dict[Page, concurrent.futures.Future[bool]] = {}
        self._read: tuple[Slab, np.ndarray] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "disk-cache-write")

    @property
    def begun(self) -> list[concurrent.futures.Future[bool]]:
        """Writes that have not been counted as ended."""
        return list(self._begun.values())

    @property
    def left_bytes(self) -> int:
        """Of pages that are not written yet."""
        return sum(page.num_bytes for page in (*self._begun, *self._waiting))

    def wants(self, of: str, key: bytes) -> bool:
        """Whether a page of that key is neither written nor on its way."""
        if not self.disk.is_writer or self.disk.has(of, key):
            return False
        page = self._tier.get(of, key)
        return page is None or not (page in self._waiting or page in self._begun)

    def offer(self, page: Page) -> None:
        """A filled page is written in its turn, if it is still there then."""
        if self.wants(page.of, page.content.key):
            self._waiting[page] = None

    def move(self) -> None:
        """Counts what has ended, and begins what may begin; waits for nothing."""
        for page in [page for page, future in self._begun.items() if future.done()]:
            del self._begun[page]
            self._tier.let_go([page.slab])
        if not self._begun:
            self._read = None
        writing = sum(page.num_bytes for page in self._begun)
        while self._waiting and writing < MOST_WRITING_BYTES:
            page, _ = self._waiting.popitem(last=False)
            if self._tier.get(page.of, page.content.key) is not page:
                continue  # it gave way meanwhile
            page.slab.holders += 1
            writing += page.num_bytes
            self._begun[page] = self._thread.submit(self._write, page)
        self._metrics.disk_stored_bytes = self.disk.stored_bytes
        self._metrics.disk_evicted_bytes = self.disk.evicted_bytes

    def close(self) -> None:
        """Writes that have not begun never will."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, page: Page) -> bool:
        stamp = time.time_ns() - 1000 * page.end  # of a prefix the end gives way first
        content = page.of, page.content, page.parent
        if self._read is None or self._read[0] is not page.slab:
            self._read = page.slab, page.slab.rows()  # once for all its pages, which come together
        return self.disk.write(*content, self._read[1][page.row], page.checksum, stamp)
