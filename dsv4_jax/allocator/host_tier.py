"""HostTier: what the prefix tree let go, by content, in a bounded part of the host's memory.

A page is a block or a snapshot, by the key of the prefix that ends with it. Which pages there are
is this file's business; what fills and reads them is the caller's, who may do so in other threads:
a page that somebody holds stays where it is.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from dsv4_jax.allocator.prefix_tree import BlockContent
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.cache.row_sums import sum_of_row


@dataclasses.dataclass(eq=False)
class Page:
    """One block or snapshot.

    Attributes:
      of: "blocks" or "snapshots".
      content: key of the prefix up to its end, and the tokens of its last block.
      parent: key of the prefix without that block.
      num_bytes: of its data.
      data: u8[n], as `cache/packed_rows.py` lays it out, in whatever memory its filler chose; None
        until it is filled.
      checksum: of the data, as `cache/row_sums.py` has it, from where it was packed.
      filling: what fills it, while it does.
      holders: who fills or reads it now; it does not give way then.
      end: tokens of the prefix up to its end.
    """

    of: str
    content: BlockContent
    parent: bytes
    num_bytes: int
    data: Any = None
    checksum: int = 0
    filling: concurrent.futures.Future[None] | None = None
    holders: int = 0
    end: int = 0


class HostTier:
    """Pages, the least recently used of which give way.

    Attributes:
      max_bytes: of all pages together, never exceeded.
      num_bytes: of the pages that are there.
      evicted_bytes: of pages that gave way so far.
    """

    def __init__(self, max_bytes: int) -> None:
        """An empty one."""
        self.max_bytes = max_bytes
        self.num_bytes = self.evicted_bytes = 0
        self._pages: collections.OrderedDict[tuple[str, bytes], Page] = collections.OrderedDict()

    @property
    def num_pages(self) -> int:
        """Blocks and snapshots."""
        return len(self._pages)

    @property
    def pages(self) -> list[Page]:
        """All of them, the least recently used first."""
        return list(self._pages.values())

    def latest(self, count: int) -> list[Page]:
        """The pages that were used last, at most so many."""
        return list(itertools.islice(reversed(self._pages.values()), count))

    def has(self, of: str, key: bytes) -> bool:
        """Whether there is a page of that key, whatever its tokens are."""
        return (of, key) in self._pages

    def find(self, of: str, content: BlockContent, parent: bytes) -> Page | None:
        """The page of that content, which is compared: a collision of keys is a miss."""
        page = self._pages.get((of, content.key))
        if page is None or page.content.tokens != content.tokens or page.parent != parent:
            return None
        return page

    def get(self, of: str, key: bytes) -> Page | None:
        """The page of that key, whatever its tokens are."""
        return self._pages.get((of, key))

    def demote(self, page: Page) -> None:
        """The next to give way, if nobody holds it."""
        if self.get(page.of, page.content.key) is page:
            self._pages.move_to_end((page.of, page.content.key), last=False)

    def add(
        self, of: str, content: BlockContent, parent: bytes, num_bytes: int, end: int = 0
    ) -> Page | None:
        """Room for a page, held once, which its caller fills.

        Others give way for it, the least recently used first. None if its key is there already,
        which is then the last used, or if there is no room.
        """
        key = of, content.key
        if key in self._pages:
            self._pages.move_to_end(key)
            return None
        if not self._make_room(num_bytes):
            return None
        page = self._pages[key] = Page(of, content, parent, num_bytes, holders=1, end=end)
        self.num_bytes += num_bytes
        return page

    def use(self, contents: Iterable[tuple[str, BlockContent]]) -> None:
        """Pages of these contents, where they are there, are the last used, the last one last."""
        for of, content in contents:
            if (of, content.key) in self._pages:
                self._pages.move_to_end((of, content.key))

    def hold(self, pages: Iterable[Page]) -> None:
        """Nobody takes these away until `let_go`, and they are the last used, the first last.

        A prefix gives way from its end, so that what is left of it can be used.
        """
        for page in reversed(list(pages)):
            page.holders += 1
            self._pages.move_to_end((page.of, page.content.key))

    def let_go(self, pages: Iterable[Page]) -> None:
        """Ends `hold`, or the first hold of a new page."""
        for page in pages:
            assert page.holders > 0
            page.holders -= 1

    def drop(self, page: Page) -> None:
        """Takes out a page that was not filled, or is damaged."""
        if self._pages.get((page.of, page.content.key)) is page:
            del self._pages[page.of, page.content.key]
            self.num_bytes -= page.num_bytes

    def problems(self) -> list[Problem]:
        """What is wrong: sizes that do not add up, and filled pages of other bytes than came."""
        found, total = [], sum(page.num_bytes for page in self._pages.values())
        if total != self.num_bytes or total > self.max_bytes:
            message = f"pages have {total} bytes, counted are {self.num_bytes} of {self.max_bytes}"
            found.append(Problem("owner", "host", message))
        for page in self._pages.values():
            if page.filling is None and sum_of_row(np.asarray(page.data)) != page.checksum:
                where = f"host {page.of} {page.content.key.hex()}"
                found.append(Problem("checksum", where, "its bytes are not those that came"))
        return found

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes are free; only then has anything given way."""
        wanted, giving = self.num_bytes + num_bytes - self.max_bytes, []
        if num_bytes > self.max_bytes:
            return False
        for page in self._pages.values():
            if wanted <= 0:
                break
            if not page.holders:
                giving.append(page)
                wanted -= page.num_bytes
        if wanted > 0:
            return False
        for page in giving:
            self.drop(page)
            self.evicted_bytes += page.num_bytes
        return True
