"""BlockPool: how often each block is held, which are free, and what gives way for a new one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4_jax.allocator.prefix_tree import PrefixNode, PrefixTree


class BlockPool:
    """Physical blocks, each held by block tables and by the prefix tree, or free.

    Attributes:
      owners: i32[NB], how many tables and tree nodes hold each block.
      generations: i32[NB], how often each block has been taken from the free ones.
      free: blocks that nobody holds, the next one last.
      freed: blocks that became free since the device was last told.
      num_evicted: blocks of cached prefixes that gave way so far.
    """

    def __init__(self, num_blocks: int, tree: PrefixTree) -> None:
        """Starts with every block free."""
        self.owners = np.zeros(num_blocks, np.int32)
        self.generations = np.zeros(num_blocks, np.int32)
        self.free = list(range(num_blocks - 1, -1, -1))
        self.freed: set[int] = set()
        self.num_evicted = 0
        self._tree = tree

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, those of cached prefixes included."""
        return len(self.free) + self._tree.num_unused

    def num_beside(self, chain: Sequence[PrefixNode]) -> int:
        """Blocks that a request can have beside those of a known prefix that it will use."""
        return self.num_free - sum(not node.users for node in chain)

    def take(self) -> int:
        """A block for one owner; one of a cached prefix gives way if none is free."""
        if not self.free:
            self.evict(1)
        block = self.free.pop()
        self.owners[block] = 1
        self.generations[block] += 1
        return block

    def hold(self, block: int) -> int:
        """One more owner of a block that has some."""
        assert self.owners[block] > 0
        self.owners[block] += 1
        return block

    def drop(self, block: int) -> None:
        """One owner less; a block without any is free."""
        assert self.owners[block] > 0
        self.owners[block] -= 1
        if not self.owners[block]:
            self.free.append(block)
            self.freed.add(block)

    def evict(self, num_blocks: int) -> int:
        """Frees up to so many blocks of cached prefixes, least recently used first."""
        count = min(num_blocks, self._tree.num_unused)
        for _ in range(count):
            self.drop(self._tree.evict().block)
        self.num_evicted += count
        return count
