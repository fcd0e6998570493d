"""Pages that lie elsewhere than on the devices, in the host's memory or in files.

They come back in runs: whole slabs of one data shard, one after the other, and behind them the
pages of files, in one array of the devices. Rows of slabs that nobody asked for come, too, and are
written nowhere.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dsv4_jax.allocator.block_contents import BlockContent
from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.host_tier import Page, Slab
from dsv4_jax.allocator.page_files import DamagedFileError, StoredPage
from dsv4_jax.serving.device.page_memory import PageMemory, parts_of, run_sizes


class FilePage(NamedTuple):
    """A page that lies on the disk alone; fields as of `Page`."""

    of: str
    content: BlockContent
    num_bytes: int
    file: StoredPage

    @property
    def slab(self) -> None:
        """It lies in none."""


type AnyPage = Page | FilePage


class DamagedError(Exception):
    """Pages that came with other bytes than they left with; they are its arguments."""


@dataclasses.dataclass(eq=False)
class FarRun:
    """Pages of one kind, in order of their prefix, that come in one array.

    Attributes:
      of: "blocks" or "snapshots".
      pages: n of them.
      places: i32[n], the row of the array that each comes in.
      slabs: those that come first.
      files: the pages that come from the disk, behind those.
      packed: what brings them; None until it is their turn. Where all devices are in this process
        it has the array.
    """

    of: str
    pages: list[AnyPage]
    places: np.ndarray
    slabs: list[Slab]
    files: list[FilePage]
    packed: concurrent.futures.Future[Any] | None = None


def runs_of(of: str, pages: Sequence[AnyPage], row_bytes: int) -> list[FarRun]:
    """Runs that bring pages of one kind, in order, each within the size of a copy."""
    most, runs, run = run_sizes(row_bytes)[-1], list[FarRun](), _Building(of)
    for slab, found in itertools.groupby(pages, operator.attrgetter("slab")):
        group = list(found)
        if slab is not None:
            is_full = run.num_rows + slab.num_rows > most or run.comes_from_other(slab.shard)
            if slab not in run.offsets and is_full:
                runs.append(run.end())
                run = _Building(of)
            run.add_slab(slab, group)
            continue
        while group:
            free = most - run.num_rows
            run.add_files(group[:free])
            group = group[free:]
            if group:
                runs.append(run.end())
                run = _Building(of)
    return [*runs, run.end()] if pages else runs


class _Building:
    """A run to which pages are added; rows of slabs come before those of files.

    Attributes:
      offsets: rows before each slab.
      num_rows: of slabs, and of files.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self.offsets: dict[Slab, int] = {}
        self.num_rows = 0
        self._pages: list[AnyPage] = []
        self._files: list[FilePage] = []
        self._parts: list[tuple[int | None, list[int]]] = []  # rows from where on; None is files

    def comes_from_other(self, shard: int) -> bool:
        """Whether it has slabs, which are of another data shard."""
        return any(slab.shard != shard for slab in self.offsets)

    def add_slab(self, slab: Slab, pages: Sequence[AnyPage]) -> None:
        if slab not in self.offsets:
            self.offsets[slab] = self.num_rows - len(self._files)
            self.num_rows += slab.num_rows
        rows = [page.row for page in pages if isinstance(page, Page)]
        self._parts.append((self.offsets[slab], rows))
        self._pages += pages

    def add_files(self, pages: Sequence[AnyPage]) -> None:
        first = len(self._files)
        self._files += [page for page in pages if isinstance(page, FilePage)]
        self._parts.append((None, list(range(first, len(self._files)))))
        self._pages += pages
        self.num_rows += len(pages)

    def end(self) -> FarRun:
        of_files = self.num_rows - len(self._files)
        places = [
            np.array(rows, np.int32) + (of_files if start is None else start)
            for start, rows in self._parts
        ]
        where = np.concatenate([np.zeros(0, np.int32), *places])
        return FarRun(self._of, self._pages, where, list(self.offsets), self._files)


def gather_run(memory: PageMemory, disk: DiskTier | None, run: FarRun) -> jax.Array:
    """In a thread: u8[m, bytes] on the devices, in which the pages are what they left as."""
    for slab in run.slabs:
        if slab.filling is not None:
            slab.filling.result()
    parts: list[Any] = [slab.data for slab in run.slabs]
    sums = [slab.sums for slab in run.slabs]
    if files := run.files:
        assert disk is not None
        data = np.empty((len(files), files[0].num_bytes), np.uint8)
        sums.append(np.zeros((len(files), 2), np.uint32))
        for row, page in enumerate(files):
            try:
                disk.read(page.file, data[row], sums[-1][row])
            except DamagedFileError as error:
                raise DamagedError(page) from error
        start = 0
        for size in parts_of(*data.shape):
            parts.append(data[start : start + size])
            start += size
    packed, found = memory.to_devices(parts)
    wrong = (np.concatenate(sums)[run.places] != found[run.places]).any(axis=1)
    if wrong.any():
        raise DamagedError(*(run.pages[number] for number in np.flatnonzero(wrong).tolist()))
    return packed
