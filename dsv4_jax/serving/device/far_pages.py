"""Pages that lie elsewhere than on the devices, in the host's memory or in files.

They come back in runs: whole slabs, one after the other, and behind them the pages of files, in one
array of the devices. Rows of slabs that nobody asked for come, too, and are written nowhere.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
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
      packed: what brings them; None until it is their turn.
    """

    of: str
    pages: list[AnyPage]
    places: np.ndarray
    slabs: list[Slab]
    packed: concurrent.futures.Future[jax.Array] | None = None

    @property
    def files(self) -> list[FilePage]:
        """Pages from the disk."""
        return [page for page in self.pages if isinstance(page, FilePage)]


def runs_of(of: str, pages: Sequence[AnyPage], row_bytes: int) -> list[FarRun]:
    """Runs that bring pages of one kind, in order, each within the size of a copy."""
    most, runs = run_sizes(row_bytes)[-1], []
    start, num_files, offsets, rows = 0, 0, dict[Slab, int](), 0
    for number, page in enumerate(pages):
        slab = page.slab if isinstance(page, Page) else None
        more = 1 if slab is None else 0 if slab in offsets else slab.num_rows
        if rows + num_files + more > most:
            runs.append(_run(of, pages[start:number], offsets, rows))
            start, num_files, offsets, rows = number, 0, {}, 0
        if slab is None:
            num_files += 1
        elif slab not in offsets:
            offsets[slab], rows = rows, rows + slab.num_rows
    return [*runs, _run(of, pages[start:], offsets, rows)] if pages else runs


def _run(of: str, pages: Sequence[AnyPage], offsets: dict[Slab, int], rows: int) -> FarRun:
    places = []
    for page in pages:
        if isinstance(page, Page):
            places.append(offsets[page.slab] + page.row)
        else:
            places.append(rows)
            rows += 1
    return FarRun(of, list(pages), np.array(places, np.int32), list(offsets))


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
