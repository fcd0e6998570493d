"""FarPlaces: which pages there are of a sequence, in the host's memory or in files."""

from __future__ import annotations

from collections.abc import Callable

from dsv4_jax.allocator.block_contents import BlockContent, HashedTokens
from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.host_tier import HostTier
from dsv4_jax.serving.device.far_pages import AnyPage, FilePage


class FarPlaces:
    """Looks in the tiers of an engine, the nearest first."""

    def __init__(
        self, tier: HostTier, disk: DiskTier | None, bytes_of_row: Callable[[str], int]
    ) -> None:
        """Of a host's tier, and of a disk if there is one; a file does not say its page's size."""
        self._tier, self._disk, self._bytes_of_row = tier, disk, bytes_of_row

    def find(self, of: str, content: BlockContent, parent: bytes) -> AnyPage | None:
        """A page of that content; None if there is none."""
        if page := self._tier.find(of, content, parent):
            return page
        file = None if self._disk is None else self._disk.find(of, content, parent)
        return None if file is None else FilePage(of, content, self._bytes_of_row(of), file)

    def find_blocks(self, tokens: HashedTokens, start: int, stop: int) -> list[AnyPage]:
        """Pages of blocks `start` to `stop`, which are hashed, up to the first that is nowhere."""
        found = list[AnyPage]()
        while start + len(found) < stop:
            first = start + len(found)
            pages = self._tier.find_blocks(tokens, first, stop)
            found += pages
            if not pages:
                page = self.find("blocks", tokens.contents[first], tokens.parents[first])
                if page is None:
                    break
                found.append(page)
        return found

    def find_snapshot(
        self, tokens: HashedTokens, start: int, stop: int
    ) -> tuple[int, AnyPage] | None:
        """The last snapshot at the end of one of these blocks, and the number of that block."""
        keys = tokens.parents[start + 1 : stop + 1]
        there = [self._tier.which("snapshots", keys)]
        if self._disk is not None:
            there.append(
                [number for number, key in enumerate(keys) if self._disk.has("snapshots", key)]
            )
        for number in sorted({start + one for found in there for one in found}, reverse=True):
            page = self.find("snapshots", tokens.contents[number], tokens.parents[number])
            if page is not None:
                return number, page
        return None
