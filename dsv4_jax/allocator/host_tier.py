"""HostTier: what the prefix tree let go, by content, in a bounded part of the host's memory.

A page is a block or a snapshot, by the key of the prefix that ends with it. Pages that were copied
together lie together, in a slab: one array, which comes, goes and gives way as a whole, so that the
host's work is for slabs and not for pages. Which there are is this file's business; what fills and
reads them is the caller's, who may do so in other threads: a slab that somebody holds stays where
it is.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsv4_jax.allocator.block_contents import BlockContent, HashedTokens
from dsv4_jax.allocator.leaving import Leaving
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.cache.row_sums import as_number, sum_of_row

_KEY = operator.itemgetter(0)
"""Of a `BlockContent`."""


class Page(NamedTuple):
    """One block or snapshot.

    Attributes:
      slab: where it lies.
      row: which row of it.
      content: key of the prefix up to its end, and the tokens of its last block.
      parent: key of the prefix without that block.
      end: tokens of the prefix up to its end.
    """

    slab: Slab
    row: int
    content: BlockContent
    parent: bytes
    end: int

    @property
    def of(self) -> str:
        """Of its slab."""
        return self.slab.of

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return self.slab.row_bytes

    @property
    def checksum(self) -> int:
        """Of its data, as `cache/row_sums.py` has it, from where it was packed."""
        return as_number(self.slab.sums[self.row])


@dataclasses.dataclass(eq=False)
class Slab:
    """Pages of one kind that came together.

    Attributes:
      of: "blocks" or "snapshots".
      row_bytes: m, of one page.
      pages: n, in order of rows; those that were dropped are left out.
      contents: of all rows.
      parents: the same.
      num_bytes: of the data, until the last page has gone.
      data: u8[n, m], rows as `cache/packed_rows.py` lays them out, in whatever memory its filler
        chose; None until it is filled.
      sums: u32[n, 2], checksums of the rows.
      filling: what fills it, while it does.
      holders: who fills or reads it now; it does not give way then.
      bytes_at: of the data, in the memory of each process.
      shard: data shard that it came from, where that matters.
    """

    of: str
    row_bytes: int
    pages: list[Page]
    num_bytes: int
    contents: list[BlockContent] = dataclasses.field(default_factory=list)
    parents: list[bytes] = dataclasses.field(default_factory=list)
    data: Any = None
    sums: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.uint32))
    filling: concurrent.futures.Future[None] | None = None
    holders: int = 0
    bytes_at: tuple[int, ...] = ()
    shard: int = 0

    @property
    def num_rows(self) -> int:
        """That it has had from the beginning."""
        return self.num_bytes // self.row_bytes

    def rows(self) -> np.ndarray:
        """The data, u8[n, m], on the host."""
        return on_host(self.data)


def on_host(data: Any) -> np.ndarray:
    """An array of JAX in the host's memory, or one of NumPy, as one of NumPy."""
    # An array of JAX keeps what NumPy was given of it: that must not be this one, since where
    # memory is pinned it is a second copy.
    return np.asarray(data.addressable_data(0) if hasattr(data, "addressable_data") else data)


class HostTier:
    """Slabs of pages, the least recently used of which give way.

    Where a mesh spans several processes, each keeps the rows that its devices have. This is then
    the one list of them all, in process 0.

    Attributes:
      max_bytes: of all slabs together in the memory of a process, never exceeded.
      evicted_bytes: of slabs that gave way so far.
      bytes_at: of the slabs that are there, in the memory of each process.
      gone: slabs that were taken out, for whoever has to be told; None is nobody.
    """

    def __init__(self, max_bytes: int, num_processes: int = 1) -> None:
        """An empty one."""
        self.max_bytes = max_bytes
        self.evicted_bytes = 0
        self.gone: list[Slab] | None = None
        self.bytes_at = [0] * num_processes
        self._pages: dict[str, dict[bytes, Page]] = {"blocks": {}, "snapshots": {}}
        self._slabs: collections.OrderedDict[Slab, None] = collections.OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The most of `bytes_at`."""
        return max(self.bytes_at)

    @property
    def num_pages(self) -> int:
        """Blocks and snapshots."""
        return sum(map(len, self._pages.values()))

    @property
    def slabs(self) -> list[Slab]:
        """All of them, the least recently used first."""
        return list(self._slabs)

    @property
    def pages(self) -> list[Page]:
        """All of them, in slabs, the most recently used first."""
        return list(self._latest())

    def latest(self, count: int) -> list[Page]:
        """The pages that were used last, at most so many."""
        return list(itertools.islice(self._latest(), count))

    def has(self, of: str, key: bytes) -> bool:
        """Whether there is a page of that key, whatever its tokens are."""
        return key in self._pages[of]

    def find(self, of: str, content: BlockContent, parent: bytes) -> Page | None:
        """The page of that content, which is compared: a collision of keys is a miss."""
        page = self._pages[of].get(content.key)
        if page is None or page.content.tokens != content.tokens or page.parent != parent:
            return None
        return page

    def find_blocks(self, tokens: HashedTokens, start: int, stop: int) -> list[Page]:
        """Pages of blocks `start` to `stop` of a sequence, which is hashed so far.

        They end at the first that is not there. Whole slabs are compared at once.
        """
        contents, parents, found = tokens.contents, tokens.parents, list[Page]()
        while start < stop:
            page = self.find("blocks", contents[start], parents[start])
            if page is None:
                break
            slab, row = page.slab, page.row
            count = min(slab.num_rows - row, stop - start)
            is_whole = len(slab.pages) == slab.num_rows
            is_whole &= slab.contents[row : row + count] == contents[start : start + count]
            if is_whole and slab.parents[row : row + count] == parents[start : start + count]:
                found += slab.pages[row : row + count]
                start += count
            else:
                found.append(page)
                start += 1
        return found

    def which(self, of: str, keys: Sequence[bytes]) -> list[int]:
        """Numbers of those keys that pages have, whatever their tokens are."""
        pages = self._pages[of]
        if pages.keys().isdisjoint(keys):
            return []
        return [number for number, key in enumerate(keys) if key in pages]

    def lacking(self, of: str, rows: Sequence[Leaving]) -> list[Leaving]:
        """Those of which no page has the key."""
        pages = self._pages[of]
        return [one for one in rows if one.content.key not in pages]

    def get(self, of: str, key: bytes) -> Page | None:
        """The page of that key, whatever its tokens are."""
        return self._pages[of].get(key)

    def demote(self, slab: Slab) -> None:
        """The next to give way, if nobody holds it."""
        if slab in self._slabs:
            self._slabs.move_to_end(slab, last=False)

    def add(
        self,
        of: str,
        rows: Sequence[Leaving],
        row_bytes: int,
        bytes_at: Sequence[int] | None = None,
        shard: int = 0,
    ) -> Slab | None:
        """Room for pages, held once, which the caller fills.

        Others give way for it, the least recently used first. None if there is no room for all.

        Args:
          of: "blocks" or "snapshots".
          rows: of pages that are not there.
          row_bytes: of each.
          bytes_at: of all, in the memory of each process; None where there is one.
          shard: as of `Slab`.
        """
        num_bytes = row_bytes * len(rows)
        bytes_at = (num_bytes,) if bytes_at is None else tuple(bytes_at)
        if not self._make_room(bytes_at):
            return None
        _, _, contents, parents, ends = map(list, zip(*rows, strict=True))
        slab = Slab(of, row_bytes, [], num_bytes, contents, parents, holders=1)
        slab.bytes_at, slab.shard = bytes_at, shard
        fields = itertools.repeat(slab), range(len(rows)), contents, parents, ends
        slab.pages = list(map(Page, *fields))
        self._pages[of].update(zip(map(_KEY, contents), slab.pages, strict=True))
        self._slabs[slab] = None
        self._count(slab, 1)
        return slab

    def use(self, keys: Iterable[tuple[str, bytes]]) -> None:
        """Pages of these keys, where they are there, are the last used, the last one last."""
        used, last, pages = dict[Slab, None](), None, self._pages
        for of, key in keys:
            page = pages[of].get(key)
            if page is not None and last is not page[0]:
                last = page[0]
                used.pop(last, None)
                used[last] = None
        for slab in used:
            self._slabs.move_to_end(slab)

    def hold(self, slabs: Sequence[Slab]) -> None:
        """Nobody takes these away until `let_go`, and they are the last used, the first last.

        A prefix gives way from its end, so that what is left of it can be used.
        """
        for slab in reversed(slabs):
            slab.holders += 1
            if slab in self._slabs:
                self._slabs.move_to_end(slab)

    def let_go(self, slabs: Iterable[Slab]) -> None:
        """Ends `hold`, or the first hold of a new slab."""
        for slab in slabs:
            assert slab.holders > 0
            slab.holders -= 1

    def drop(self, page: Page) -> None:
        """Takes out a page that was not filled, or is damaged; with the last one its slab goes."""
        if self._pages[page.of].get(page.content.key) is page:
            del self._pages[page.of][page.content.key]
            page.slab.pages.remove(page)
            if not page.slab.pages:
                self._remove(page.slab)

    def problems(self) -> list[Problem]:
        """What is wrong: sizes that do not add up, and filled pages of other bytes than came."""
        found = []
        for process, counted in enumerate(self.bytes_at):
            total = sum(slab.bytes_at[process] for slab in self._slabs)
            if total != counted or total > self.max_bytes:
                message = f"slabs have {total} bytes, counted are {counted} of {self.max_bytes}"
                found.append(Problem("owner", "host", message))
        for slab in self._slabs:
            if slab.filling is not None or len(self.bytes_at) > 1:
                continue  # it comes, or each process has its own part
            rows = slab.rows()
            for page in slab.pages:
                if sum_of_row(rows[page.row]) != page.checksum:
                    where = f"host {page.of} {page.content.key.hex()}"
                    found.append(Problem("checksum", where, "its bytes are not those that came"))
        return found

    def _latest(self) -> Iterator[Page]:
        for slab in reversed(self._slabs):
            yield from slab.pages

    def _make_room(self, bytes_at: Sequence[int]) -> bool:
        """Whether so many bytes are free; only then has anything given way."""
        wanted = [
            there + more - self.max_bytes
            for there, more in zip(self.bytes_at, bytes_at, strict=True)
        ]
        giving = []
        if max(bytes_at) > self.max_bytes:
            return False
        for slab in self._slabs:
            if max(wanted) <= 0:
                break
            # One that frees nothing where room is missing stays.
            if not slab.holders and any(
                missing > 0 and freed for missing, freed in zip(wanted, slab.bytes_at, strict=True)
            ):
                giving.append(slab)
                wanted = [one - freed for one, freed in zip(wanted, slab.bytes_at, strict=True)]
        if max(wanted) > 0:
            return False
        for slab in giving:
            for page in slab.pages:
                del self._pages[page.of][page.content.key]
            self._remove(slab)
            self.evicted_bytes += slab.num_bytes
        return True

    def _remove(self, slab: Slab) -> None:
        del self._slabs[slab]
        self._count(slab, -1)
        if self.gone is not None:
            self.gone.append(slab)
        if not slab.holders:
            slab.data = None  # whoever still knows one of its pages does not keep their bytes

    def _count(self, slab: Slab, sign: int) -> None:
        self.bytes_at = [
            there + sign * own for there, own in zip(self.bytes_at, slab.bytes_at, strict=True)
        ]
