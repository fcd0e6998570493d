"""PrefixTree: which full blocks hold which tokens, who uses them, and which boundaries resume.

A node is one full block of a sequence: its tokens, after those of its parents. A request can resume
at a node whose boundary has a snapshot; any other node only leads to those. Who uses a node uses
its parents, so that nodes without a user are evicted leaves first.

The tree says what was used least recently; the block pool owns the blocks.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from dsv4_jax.allocator.block_contents import BlockContent, HashedTokens
from dsv4_jax.allocator.leaving import Leaving, Room


@dataclasses.dataclass(eq=False, slots=True)
class PrefixNode:
    """One full block of a known prefix.

    Attributes:
      key: hash of the prefix up to the end of this block.
      parent: the block before; None for a first one.
      content: the key, and i32 ids of this block, as bytes.
      block: physical block that holds its entries.
      end: tokens of the prefix up to the end of this block.
      users: requests that start with this prefix; at most those of the parent.
      num_children: nodes that follow.
      snapshot: place in the snapshot store, -1 where the boundary cannot be resumed at.
      last_used: when a request last used it, on the tree's own clock.
      is_kept: still part of the tree.
      is_demoted: its snapshot is not worth keeping once it has given way.
      snapshot_holds: how many wait to resume from its snapshot, which gives way to none then.
      must_follow: known tokens that have to follow the boundary, up to the last boundary of who
        resumes there, since rings of some layers are not what they should be; 0 where they are.
    """

    key: bytes
    parent: PrefixNode | None
    content: BlockContent
    block: int
    end: int
    users: int = 0
    num_children: int = 0
    snapshot: int = -1
    last_used: int = 0
    is_kept: bool = True
    is_demoted: bool = False
    snapshot_holds: int = 0
    must_follow: int = 0

    def leaving(self, of: str) -> Leaving:
        """Its block or snapshot, which has not left yet."""
        row, parent = self.block if of == "blocks" else self.snapshot, self.parent
        return Leaving(of, row, self.content, parent.key if parent else b"", self.end)


type _Leaf = tuple[bool, int, int, PrefixNode]
"""Whether it resumes, when it was last used, a number that is no other's, and a node."""


class PrefixTree:
    """Full blocks by content, and the snapshots of their boundaries.

    Attributes:
      block_tokens: tokens of a block.
      num_snapshots: places of the snapshot store.
      snapshot_generations: i32[num_snapshots], how often each place has been written.
      num_evicted_snapshots: snapshots that gave way to others.
      leaving: what has given way since somebody emptied the list; None if nobody wants to know.
      unused: nodes that lost their last user since then, the end of a prefix first; None likewise.
      unused_of_part: nodes without a user, by the part of the blocks that theirs is of.
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
        self.unused_of_part = [0] * block_parts
        self._free_snapshots = list(range(num_snapshots - 1, -1, -1))
        self._snapshots: collections.OrderedDict[int, PrefixNode] = collections.OrderedDict()
        self.snapshot_generations = np.zeros(num_snapshots, np.int32)
        self.num_evicted_snapshots = 0
        self._leaves: list[tuple[bool, int, int, PrefixNode]] = []
        self._clock = itertools.count(1)
        self.leaving: list[Leaving] | None = None
        self.unused: list[PrefixNode] | None = None
        self._matched: weakref.WeakKeyDictionary[HashedTokens, list[PrefixNode]]
        self._matched = weakref.WeakKeyDictionary()

    @property
    def num_unused(self) -> int:
        """Nodes without a user; all of them can be evicted."""
        counts = self.unused_of_part
        return counts[0] if len(counts) == 1 else sum(counts)

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

    def match(self, tokens: HashedTokens, num_blocks: int) -> list[PrefixNode]:
        """The known nodes that a sequence starts with.

        What was found before is looked at again from its end: who is still there has its parents.

        Args:
          tokens: of the sequence.
          num_blocks: full blocks of it that count.

        Returns:
          Nodes from the first block on, whether or not they can be resumed at.
        """
        chain = self._matched.get(tokens)
        if chain is None:
            chain = self._matched[tokens] = []
        while chain and not chain[-1].is_kept:
            chain.pop()
        num_blocks = min(num_blocks, tokens.num_blocks)
        while len(chain) < num_blocks:
            content = tokens.upto(len(chain) + 1)[len(chain)]
            node = self.find_child(chain[-1] if chain else None, content)
            if node is None:
                break
            chain.append(node)
        return chain[:num_blocks]

    def add_match(self, tokens: HashedTokens, chain: Sequence[PrefixNode]) -> None:
        """Says that a sequence starts with these nodes, all of which somebody uses."""
        matched = self._matched.setdefault(tokens, [])
        while matched and not matched[-1].is_kept:
            matched.pop()
        matched += chain[len(matched) :]

    def has(self, key: bytes) -> bool:
        """Whether a node has that key, whatever its tokens are."""
        return key in self._nodes

    def get(self, key: bytes) -> PrefixNode | None:
        """The node of that key, whatever its tokens are."""
        return self._nodes.get(key)

    def find_child(self, parent: PrefixNode | None, content: BlockContent) -> PrefixNode | None:
        """The node of one more block after `parent`, if the tree has it."""
        node = self._nodes.get(content.key)
        if node is None or node.content.tokens != content.tokens or node.parent is not parent:
            return None
        return node

    def insert(
        self, parent: PrefixNode | None, content: BlockContent, block: int
    ) -> PrefixNode | None:
        """Adds one more block after `parent`, without a user; None if its key is another's."""
        if content.key in self._nodes:
            return None
        node = self._insert(parent, content, block, 0)
        self.unused_of_part[self.part_of(node)] += 1
        self._offer(node)
        return node

    def insert_used(
        self, chain: list[PrefixNode], contents: Sequence[BlockContent], blocks: Sequence[int]
    ) -> None:
        """Adds blocks, of keys that are not there, behind a prefix, each with one user.

        Args:
          chain: nodes of the prefix; the new ones are added.
          contents: of each block.
          blocks: as many.
        """
        parent, size, first = chain[-1] if chain else None, self.block_tokens, len(chain)
        end, nodes, clock = len(chain) * size, self._nodes, self._clock
        for content, block in zip(contents, blocks, strict=True):
            end += size
            node = PrefixNode(content.key, parent, content, block, end, 1, 1, -1, next(clock))
            nodes[content.key] = parent = node
            chain.append(node)
        if len(chain) > first:
            chain[-1].num_children = 0
            if first:
                chain[first - 1].num_children += 1

    def _insert(
        self, parent: PrefixNode | None, content: BlockContent, block: int, users: int
    ) -> PrefixNode:
        end = (parent.end if parent else 0) + self.block_tokens
        node = PrefixNode(content.key, parent, content, block, end, users)
        self._nodes[content.key] = node
        if parent is not None:
            parent.num_children += 1
        node.last_used = next(self._clock)
        return node

    def use(self, *chain: PrefixNode) -> None:
        """Counts one more user of nodes, parents first."""
        clock = self._clock
        for node in chain:
            if not node.users:
                self.unused_of_part[self.part_of(node)] -= 1
            node.users += 1
            node.last_used = next(clock)
            if node.snapshot >= 0:
                self._snapshots.move_to_end(node.snapshot)
                node.is_demoted = False

    def leave(self, *chain: PrefixNode) -> None:
        """Counts one user less of nodes, parents first; those are the last used."""
        clock, left = self._clock, []
        for node in reversed(chain):
            assert node.users > 0
            node.users -= 1
            node.last_used = next(clock)
            if not node.users:
                self.unused_of_part[self.part_of(node)] += 1
                if not node.num_children:
                    self._offer(node)
                left.append(node)
        if self.unused is not None:
            self.unused += left

    def evict(self) -> PrefixNode:
        """Takes the least recently used leaf without a user out; there must be one."""
        return self.evict_many(1)[0]

    def evict_many(self, count: int, room: Room | None = None) -> list[PrefixNode]:
        """Takes leaves without a user out, one after the other, the least recently used first.

        A leaf that cannot be resumed at leads nowhere and goes before any that can.

        Args:
          count: how many; so many nodes have no user.
          room: what may leave, at most, with what each takes; None is all.
        """
        leaves, nodes, clock = self._leaves, self._nodes, self._clock
        left, following, gone = room.num_bytes if room else 0, None, list[PrefixNode]()
        while len(gone) < count:
            # What is offered now is most often what goes next.
            entry = heapq.heappushpop(leaves, following) if following else heapq.heappop(leaves)
            following = None
            if not _is_current(entry):
                continue
            node = entry[3]
            if room:
                left -= room.block_bytes + (node.snapshot >= 0) * room.snapshot_bytes
                if left < 0:
                    following = entry
                    break
            if node.snapshot >= 0:
                self.drop_snapshot(node)
            node.is_kept = False
            del nodes[node.key]
            gone.append(node)
            parent = node.parent
            if parent is not None:
                parent.num_children -= 1
                if not parent.num_children and not parent.users:
                    following = (parent.snapshot >= 0, parent.last_used, next(clock), parent)
            if self.leaving is not None:
                self.leaving.append(node.leaving("blocks"))
        if following is not None:
            heapq.heappush(leaves, following)
        for node in gone:
            self.unused_of_part[self.part_of(node)] -= 1
        self._drop_stale_leaves()
        return gone

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

    def put_snapshot(self, node: PrefixNode, place: int, must_follow: int = 0) -> None:
        """The place now holds what resumes at the end of `node`, in place of what is worth less."""
        if node.must_follow > must_follow:
            self.drop_snapshot(node)
        assert node.snapshot < 0
        node.snapshot, node.is_demoted, node.must_follow = place, False, must_follow
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
            if not node.is_demoted and not node.must_follow:
                self._note("snapshots", node)
            del self._snapshots[node.snapshot]
            self._free_snapshots.append(node.snapshot)
            node.snapshot, node.must_follow = -1, 0
            self._offer(node)

    def _note(self, of: str, node: PrefixNode) -> None:
        if self.leaving is not None:
            self.leaving.append(node.leaving(of))

    def _offer(self, node: PrefixNode) -> None:
        """Lists a node for eviction, if it may go; entries that no longer hold are skipped."""
        if node.is_kept and not node.users and not node.num_children:
            entry = (node.snapshot >= 0, node.last_used, next(self._clock), node)
            heapq.heappush(self._leaves, entry)
        self._drop_stale_leaves()

    def _drop_stale_leaves(self) -> None:
        if len(self._leaves) > 64 + 4 * len(self._nodes):
            fresh = {id(entry[3]): entry for entry in self._leaves if _is_current(entry)}
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)


def _is_current(entry: _Leaf) -> bool:
    """Whether a node may go, and is listed as what it is."""
    node = entry[3]
    is_leaf = node.is_kept and not node.users and not node.num_children
    return is_leaf and entry[1] == node.last_used and entry[0] == (node.snapshot >= 0)
