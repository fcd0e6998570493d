"""PrefixTree: which full blocks hold which tokens, who uses them, and which boundaries resume.

A node is one full block of a sequence: its tokens, after those of its parents. Its key is a salted
hash, chained over the prefix that ends with it, and its tokens are compared too, so that a
collision is a miss and never a wrong hit. A request can resume at a node whose boundary has a
snapshot; any other node only leads to those. Who uses a node uses its parents, so that nodes
without a user are evicted leaves first.

The tree says what was used least recently; the block pool owns the blocks.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_DIGEST_BYTES = 16


@dataclasses.dataclass(eq=False)
class PrefixNode:
    """One full block of a known prefix.

    Attributes:
      key: hash of the prefix up to the end of this block.
      parent: the block before; None for a first one.
      tokens: i32 ids of this block, as bytes.
      block: physical block that holds its entries.
      end: tokens of the prefix up to the end of this block.
      users: requests that start with this prefix; at most those of the parent.
      num_children: nodes that follow.
      snapshot: place in the snapshot store, -1 where the boundary cannot be resumed at.
      last_used: when a request last used it, on the tree's own clock.
      is_kept: still part of the tree.
      is_demoted: its snapshot is not worth keeping once it has given way.
      snapshot_holds: how many wait to resume from its snapshot, which gives way to none then.
    """

    key: bytes
    parent: PrefixNode | None
    tokens: bytes
    block: int
    end: int
    users: int = 0
    num_children: int = 0
    snapshot: int = -1
    last_used: int = 0
    is_kept: bool = True
    is_demoted: bool = False
    snapshot_holds: int = 0


class BlockContent(NamedTuple):
    """One more block of a prefix; fields as in `PrefixNode`."""

    key: bytes
    tokens: bytes

    @classmethod
    def after(cls, parent: PrefixNode | None, token_ids: np.ndarray, salt: bytes) -> BlockContent:
        """Tokens i32[n] of the block after `parent`, or of a first one."""
        tokens = _token_bytes(token_ids)
        return cls(_chain(parent.key if parent else _root_key(salt), tokens), tokens)


class Leaving(NamedTuple):
    """A block or a snapshot that has left the tree, and whose row is still what it was.

    Attributes:
      of: "blocks" or "snapshots".
      row: the block, or the place in the store.
      content: key and tokens of its node.
      parent: key of the prefix before the node's block; b"" is no prefix.
      end: tokens of the prefix up to the end of that block.
    """

    of: str
    row: int
    content: BlockContent
    parent: bytes
    end: int

    @classmethod
    def of_node(cls, of: str, node: PrefixNode) -> Leaving:
        """A node's block or snapshot, which has not left yet."""
        row = node.block if of == "blocks" else node.snapshot
        parent = b"" if node.parent is None else node.parent.key
        return cls(of, row, BlockContent(node.key, node.tokens), parent, node.end)


def contents_of(
    token_ids: np.ndarray, salt: bytes, block_tokens: int
) -> Iterator[tuple[BlockContent, bytes]]:
    """Each full block of a sequence, and the key of the prefix before it; b"" is no prefix."""
    key, parent = _root_key(salt), b""
    for start in range(0, len(token_ids) // block_tokens * block_tokens, block_tokens):
        tokens = _token_bytes(token_ids[start : start + block_tokens])
        key = _chain(key, tokens)
        yield BlockContent(key, tokens), parent
        parent = key


class PrefixTree:
    """Full blocks by content, and the snapshots of their boundaries.

    Attributes:
      block_tokens: tokens of a block.
      num_snapshots: places of the snapshot store.
      snapshot_generations: i32[num_snapshots], how often each place has been written.
      num_evicted_snapshots: snapshots that gave way to others.
      leaving: what has given way since somebody emptied the list; None if nobody wants to know.
      unused: nodes that lost their last user since then, the end of a prefix first; None likewise.
      unused_of_part: i32[n], nodes without a user, by the part of the blocks that theirs is of.
    """

    def __init__(self, block_tokens: int, num_snapshots: int, block_parts: int = 1) -> None:
        """An empty tree.

        Args:
          block_tokens: tokens of a block.
          num_snapshots: places of the snapshot store.
          block_parts: n; the b-th block of a sequence is of part b % n.
        """
        self.block_tokens = block_tokens
        self.num_snapshots = num_snapshots
        self._nodes: dict[bytes, PrefixNode] = {}
        self.unused_of_part = np.zeros(block_parts, np.int32)
        self._free_snapshots = list(range(num_snapshots - 1, -1, -1))
        self._snapshots: collections.OrderedDict[int, PrefixNode] = collections.OrderedDict()
        self.snapshot_generations = np.zeros(num_snapshots, np.int32)
        self.num_evicted_snapshots = 0
        self._leaves: list[tuple[bool, int, int, PrefixNode]] = []
        self._clock = itertools.count(1)
        self.leaving: list[Leaving] | None = None
        self.unused: list[PrefixNode] | None = None

    @property
    def num_unused(self) -> int:
        """Nodes without a user; all of them can be evicted."""
        return int(self.unused_of_part.sum())

    @property
    def num_nodes(self) -> int:
        """Blocks of known prefixes."""
        return len(self._nodes)

    @property
    def num_free_snapshots(self) -> int:
        """Places of the snapshot store that hold nothing."""
        return len(self._free_snapshots)

    @property
    def num_held_snapshots(self) -> int:
        """Boundaries that can be resumed at."""
        return len(self._snapshots)

    @property
    def snapshot_ends(self) -> np.ndarray:
        """i32[num_snapshots], the boundary that each place resumes at; -1 where it holds none."""
        ends = np.full(self.num_snapshots, -1, np.int32)
        for place, node in self._snapshots.items():
            ends[place] = node.end
        return ends

    @property
    def nodes(self) -> list[PrefixNode]:
        """Every node, oldest first."""
        return list(self._nodes.values())

    def resumable(self) -> Iterator[PrefixNode]:
        """Nodes that can be resumed at, the last used first."""
        return reversed(self._snapshots.values())

    def part_of(self, node: PrefixNode) -> int:
        """The part of the blocks that a node's is of."""
        return (node.end // self.block_tokens - 1) % len(self.unused_of_part)

    def match(self, token_ids: np.ndarray, salt: bytes) -> list[PrefixNode]:
        """The known nodes that a sequence starts with.

        Args:
          token_ids: i32[n], of which full blocks count.
          salt: sequences of different salts never match.

        Returns:
          Nodes from the first block on, whether or not they can be resumed at.
        """
        chain: list[PrefixNode] = []
        parent, key = None, _root_key(salt)
        for number in range(len(token_ids) // self.block_tokens):
            start = number * self.block_tokens
            tokens = _token_bytes(token_ids[start : start + self.block_tokens])
            key = _chain(key, tokens)
            node = self._nodes.get(key)
            if node is None or node.tokens != tokens or node.parent is not parent:
                break
            chain.append(node)
            parent = node
        return chain

    def find_child(self, parent: PrefixNode | None, content: BlockContent) -> PrefixNode | None:
        """The node of one more block after `parent`, if the tree has it."""
        node = self._nodes.get(content.key)
        if node is None or node.tokens != content.tokens or node.parent is not parent:
            return None
        return node

    def insert(
        self, parent: PrefixNode | None, content: BlockContent, block: int
    ) -> PrefixNode | None:
        """Adds one more block after `parent`, without a user; None if its key is another's."""
        if content.key in self._nodes:
            return None
        end = (parent.end if parent else 0) + self.block_tokens
        node = PrefixNode(content.key, parent, content.tokens, block, end)
        self._nodes[content.key] = node
        self.unused_of_part[self.part_of(node)] += 1
        if parent is not None:
            parent.num_children += 1
        self._touch(node)
        self._offer(node)
        return node

    def use(self, node: PrefixNode) -> None:
        """Counts one more user."""
        self.unused_of_part[self.part_of(node)] -= node.users == 0
        node.users += 1
        self._touch(node)
        if node.snapshot >= 0:
            self._snapshots.move_to_end(node.snapshot)
            node.is_demoted = False

    def leave(self, node: PrefixNode) -> None:
        """Counts one user less."""
        assert node.users > 0
        node.users -= 1
        self.unused_of_part[self.part_of(node)] += node.users == 0
        self._touch(node)
        self._offer(node)
        if self.unused is not None and not node.users:
            self.unused.append(node)

    def evict(self) -> PrefixNode:
        """Takes the least recently used leaf without a user out; there must be one.

        A leaf that cannot be resumed at leads nowhere and goes before any that can.
        """
        node = self._pop_oldest_leaf()
        self.drop_snapshot(node)
        self._note("blocks", node)
        node.is_kept = False
        del self._nodes[node.key]
        self.unused_of_part[self.part_of(node)] -= 1
        if node.parent is not None:
            node.parent.num_children -= 1
            self._offer(node.parent)
        return node

    def take_snapshot_place(self) -> int:
        """A place in the store, taken from the least recently used snapshot if none is free.

        Only a snapshot gives way to a snapshot, and none that somebody holds; blocks stay. -1 if
        there is no place at all.
        """
        if not self._free_snapshots:
            oldest = (node for node in self._snapshots.values() if not node.snapshot_holds)
            node = next(oldest, None)
            if node is None:
                return -1
            self.drop_snapshot(node)
            self.num_evicted_snapshots += 1
        return self._free_snapshots.pop()

    def return_snapshot_place(self, place: int) -> None:
        """Gives a place back that holds nothing."""
        self._free_snapshots.append(place)

    def put_snapshot(self, node: PrefixNode, place: int) -> None:
        """The place now holds what resumes at the end of `node`."""
        assert node.snapshot < 0
        node.snapshot, node.is_demoted = place, False
        self._snapshots[place] = node
        self.snapshot_generations[place] += 1
        self._offer(node)

    def demote_snapshot(self, node: PrefixNode) -> None:
        """The next snapshot to give way is this one."""
        if node.snapshot >= 0:
            self._snapshots.move_to_end(node.snapshot, last=False)
            node.is_demoted = True

    def drop_snapshot(self, node: PrefixNode) -> None:
        """The boundary can no longer be resumed at; its place is free."""
        if node.snapshot >= 0:
            if not node.is_demoted:
                self._note("snapshots", node)
            del self._snapshots[node.snapshot]
            self._free_snapshots.append(node.snapshot)
            node.snapshot = -1
            self._offer(node)

    def _note(self, of: str, node: PrefixNode) -> None:
        if self.leaving is not None:
            self.leaving.append(Leaving.of_node(of, node))

    def _touch(self, node: PrefixNode) -> None:
        node.last_used = next(self._clock)

    def _pop_oldest_leaf(self) -> PrefixNode:
        """The leaf that goes next, off the list; entries that no longer hold are dropped."""
        while True:
            resumable, last_used, _, node = heapq.heappop(self._leaves)
            is_current = (resumable, last_used) == (node.snapshot >= 0, node.last_used)
            if node.is_kept and not node.users and not node.num_children and is_current:
                return node

    def _offer(self, node: PrefixNode) -> None:
        """Lists a node for eviction, if it may go; entries that no longer hold are skipped."""
        if node.is_kept and not node.users and not node.num_children:
            entry = (node.snapshot >= 0, node.last_used, next(self._clock), node)
            heapq.heappush(self._leaves, entry)
        if len(self._leaves) > 64 + 4 * len(self._nodes):
            fresh = {
                id(node): (resumable, last_used, order, node)
                for resumable, last_used, order, node in self._leaves
                if node.is_kept
                and (resumable, last_used) == (node.snapshot >= 0, node.last_used)
                and not node.users
                and not node.num_children
            }
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)


def _token_bytes(token_ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(token_ids, np.int32).tobytes()


def _root_key(salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"root").digest()


def _chain(key: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=_DIGEST_BYTES, key=key).digest()
