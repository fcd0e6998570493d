"""A prefix that lies partly elsewhere than on the devices: how far it goes, and its way back."""

from __future__ import annotations

import dataclasses

from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.allocator.host_tier import Slab
from dsv4_jax.allocator.prefix_cache import PrefixCache
from dsv4_jax.allocator.prefix_tree import PrefixNode
from dsv4_jax.serving.device.far_pages import AnyPage, FarRun
from dsv4_jax.serving.device.far_places import FarPlaces
from dsv4_jax.serving.requests.request import Request


class FarSearch:
    """A search for the longest prefix that ends at a snapshot, in portions.

    Attributes:
      blocks: pages of blocks that the devices lack, in order.
      length: blocks of the longest prefix so far.
      snapshot: at its end; None while it is no longer than what the devices can resume.
    """

    def __init__(self, tokens: HashedTokens, most: int, num_known: int, resumable: int) -> None:
        """Has looked at nothing yet.

        Args:
          tokens: what is looked for.
          most: blocks of it that count.
          num_known: first ones that the devices have.
          resumable: those up to the last snapshot that the devices have.
        """
        self._tokens, self._most, self._number = tokens, most, resumable
        self.num_known, self.resumable = num_known, resumable
        self.blocks: list[AnyPage] = []
        self.length = resumable
        self.snapshot: AnyPage | None = None

    def go_on(self, places: FarPlaces, count: int) -> bool:
        """Looks for so many further blocks; whether it has ended."""
        start, end = self._number, min(self._number + count, self._most)
        self._tokens.upto(end)
        first = min(max(start, self.num_known), end)
        pages = places.find_blocks(self._tokens, first, end)
        self.blocks += pages
        if first + len(pages) < end:
            end = self._most = first + len(pages)
        if snapshot := places.find_snapshot(self._tokens, start, end):
            self.length, self.snapshot = snapshot[0] + 1, snapshot[1]
        self._number = end
        return end == self._most

    @property
    def pages(self) -> list[AnyPage]:
        """What of the blocks the prefix needs."""
        return self.blocks[: max(self.length - self.num_known, 0)]


@dataclasses.dataclass(eq=False)
class Fetch:
    """A prefix on its way back.

    First it is looked up, `search`, while the slabs of what was found are `held`, and then brought,
    in runs of blocks and one of a snapshot. `chain` are the nodes that are used. `num_tokens` are
    those that it spares, `file_tokens` those of blocks from the disk. Without a search and runs it
    has come, and `resumes` at its last node.
    """

    request: Request
    shard: int
    tokens: HashedTokens
    chain: list[PrefixNode]
    started_s: float
    search: FarSearch | None
    held: dict[Slab, None] = dataclasses.field(default_factory=dict)
    runs: list[FarRun] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    file_tokens: int = 0
    resumes: PrefixNode | None = None

    @property
    def is_coming(self) -> bool:
        """Whether it has not come yet."""
        return self.search is not None or bool(self.runs)

    @property
    def keys(self) -> set[tuple[str, bytes]]:
        """Of the pages on their way."""
        return {(run.of, page.content.key) for run in self.runs for page in run.pages}

    def take_rows(self, prefixes: PrefixCache, run: FarRun) -> list[int]:
        """Rows for the first pages of a run that can be written, -1 for one that is there."""
        if run.of == "blocks":
            return prefixes.bring_back(self.chain, [page.content for page in run.pages])
        if not self.chain:
            return []
        parent = self.chain[-1]
        if parent.snapshot >= 0 and not parent.must_follow:
            return [-1]
        place = prefixes.begin_snapshot()
        if place < 0:
            return []
        prefixes.tree.put_snapshot(parent, place)
        return [place]
