"""BlockPool: how often each block is held, which are free, and what gives way for a new one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from dsv4_jax.allocator.prefix_tree import PrefixNode, PrefixTree


class BlockPool:
    """Physical blocks, each held by block tables and by the prefix tree, or free.

    Where a cache is split, the blocks come in equal parts, one after the other, one for each device
    of a data shard, and the b-th block of a request is of part b % n. Else there is one part.

    Attributes:
      owners: i32[NB], how many tables and tree nodes hold each block.
      generations: i32[NB], how often each block has been taken from the free ones.
      free_of_part: blocks of each part that nobody holds, the next one last.
      freed: blocks that became free since the device was last told.
      num_evicted: blocks of cached prefixes that gave way so far.
    """

    def __init__(self, num_blocks: int, tree: PrefixTree) -> None:
        """Starts with every block free, in as many parts as the tree counts."""
        self.owners = np.zeros(num_blocks, np.int32)
        self.generations = np.zeros(num_blocks, np.int32)
        parts = len(tree.unused_of_part)
        self._size = num_blocks // parts
        self.free_of_part = [
            list(range((part + 1) * self._size - 1, part * self._size - 1, -1))
            for part in range(parts)
        ]
        self.freed: set[int] = set()
        self.num_evicted = 0
        self._tree = tree

    @property
    def free(self) -> list[int]:
        """Blocks that nobody holds."""
        return [block for part in self.free_of_part for block in part]

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, those of cached prefixes included."""
        return sum(map(len, self.free_of_part)) + self._tree.num_unused

    def left_beside(self, chain: Sequence[PrefixNode], first: int, end: int) -> list[int]:
        """What a request leaves of each part, if it takes blocks of its own.

        Args:
          chain: nodes of a known prefix that it will use.
          first: its first own block's number in the request.
          end: the number after its last one's.

        Returns:
          Of each part, blocks that no request would hold; below 0 where there are too few.
        """
        parts = len(self.free_of_part)
        # Who uses a node uses its parents: those without a user are the last ones.
        used = bisect.bisect_left(chain, True, key=lambda node: not node.users)

        def of_part(part: int, start: int, stop: int) -> int:
            return len(range(start + (part - start) % parts, stop, parts))

        return [
            len(free)
            + self._tree.unused_of_part[part]
            - of_part(part, used, len(chain))
            - of_part(part, first, end)
            for part, free in enumerate(self.free_of_part)
        ]

    def has_beside(self, logical: int, num_blocks: int) -> bool:
        """Whether the b-th block of a sequence can be taken, and so many be left of all."""
        part = logical % len(self.free_of_part)
        has_one = self.free_of_part[part] or self._tree.unused_of_part[part]
        return bool(has_one) and self.num_free > num_blocks

    def shortage(self, chain: Sequence[PrefixNode], first: int, end: int) -> str:
        """What is missing for a request that takes blocks as of `left_beside`; "" is nothing."""
        left = self.left_beside(chain, first, end)
        fewest = min(left)
        if fewest >= 0:
            return ""
        if len(left) == 1:
            return f"{fewest + end - first} of {len(self.owners)} are free"
        return f"{-fewest} too few are free on device {left.index(fewest)} of the data shard"

    def take(self, logical: int) -> int:
        """A block for one owner, the b-th of a request.

        Cached prefixes give way, least recently used first, until one of its part is free.
        """
        free = self.free_of_part[logical % len(self.free_of_part)]
        while not free and self.evict(1):
            pass
        block = free.pop()
        self.owners[block] = 1
        self.generations[block] += 1
        return block

    def hold(self, block: int) -> int:
        """One more owner of a block that has some."""
        assert self.owners[block] > 0
        self.owners[block] += 1
        return block

    def hold_all(self, blocks: np.ndarray) -> None:
        """One more owner of each of blocks i32[n] that have some, none twice."""
        assert (self.owners[blocks] > 0).all()
        self.owners[blocks] += 1

    def drop_all(self, blocks: np.ndarray) -> None:
        """One owner less of each of blocks i32[n], none twice; the last one is free first."""
        assert (self.owners[blocks] > 0).all()
        self.owners[blocks] -= 1
        for block in blocks[self.owners[blocks] == 0][::-1].tolist():
            self.free_of_part[block // self._size].append(block)
            self.freed.add(block)

    def drop(self, block: int) -> None:
        """One owner less; a block without any is free."""
        assert self.owners[block] > 0
        self.owners[block] -= 1
        if not self.owners[block]:
            self.free_of_part[block // self._size].append(block)
            self.freed.add(block)

    def evict(self, num_blocks: int) -> int:
        """Frees up to so many blocks of cached prefixes, least recently used first."""
        count = min(num_blocks, self._tree.num_unused)
        for _ in range(count):
            self.drop(self._tree.evict().block)
        self.num_evicted += count
        return count
