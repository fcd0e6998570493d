"""BlockPool: how often each block is held, which are free, and what gives way for a new one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from dsv4_jax.allocator.leaving import Room
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

    def missing(self, first: int, count: int) -> int:
        """Blocks of cached prefixes that have to give way, at least, for a request to take blocks.

        Args:
          first: the first one's number in the request.
          count: how many.
        """
        parts = len(self.free_of_part)
        wanted = [(count + parts - 1 - (part - first) % parts) // parts for part in range(parts)]
        every = zip(wanted, self.free_of_part, self._tree.unused_of_part, strict=True)
        return sum(min(max(num - len(free), 0), unused) for num, free, unused in every)

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

    def take_many(self, logical: int, count: int, beside: int) -> list[int]:
        """Blocks for one owner, of a request from its b-th on, as `take` gives one.

        They are fewer where none is left of the part of the next one, or no more than `beside` are
        free of all.
        """
        blocks, parts = list[int](), len(self.free_of_part)
        if parts > 1:
            while len(blocks) < count and self.has_beside(logical + len(blocks), beside):
                blocks.append(self.take(logical + len(blocks)))
            return blocks
        (free,) = self.free_of_part
        count = max(min(count, self.num_free - beside), 0)
        while len(blocks) < count:
            if not free:
                self.evict(count - len(blocks))
                free.reverse()  # in the order in which they gave way
            some = min(count - len(blocks), len(free))
            blocks += free[: -some - 1 : -1]
            del free[-some:]
        if blocks:
            self.owners[blocks] = 1
            self.generations[blocks] += 1
        return blocks

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
        freed = blocks[self.owners[blocks] == 0][::-1].tolist()
        self.freed.update(freed)
        if len(self.free_of_part) == 1:
            self.free_of_part[0] += freed
            return
        for block in freed:
            self.free_of_part[block // self._size].append(block)

    def evict(self, num_blocks: int, room: Room | None = None) -> int:
        """Frees up to so many blocks of cached prefixes, least recently used first.

        None is freed that would not fit into `room`; None is as many as are asked for.
        """
        count = max(min(num_blocks, self._tree.num_unused), 0)
        gone = [node.block for node in self._tree.evict_many(count, room)]
        if gone:
            self.drop_all(np.array(gone[::-1], np.int32))
        self.num_evicted += len(gone)
        return len(gone)
