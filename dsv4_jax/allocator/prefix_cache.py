"""PrefixCache: what admitted requests have in common with the prefix tree, and its snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv4_jax import checks
from dsv4_jax.allocator.block_contents import BlockContent, HashedTokens
from dsv4_jax.allocator.block_pool import BlockPool
from dsv4_jax.allocator.pending_changes import PendingChanges
from dsv4_jax.allocator.prefix_tree import PrefixNode, PrefixTree


@dataclasses.dataclass
class RequestPrefix:
    """The part of an admitted request that the tree knows.

    Attributes:
      salt: prefixes are shared among requests of one salt only.
      hit_tokens: tokens that the request was admitted with.
      chain: nodes of its first full blocks, which it uses.
      is_shareable: further blocks may become known.
    """

    salt: bytes
    hit_tokens: int
    chain: list[PrefixNode] = dataclasses.field(default_factory=list)
    is_shareable: bool = True


class PrefixCache:
    """Prefixes that requests share, by content, and the boundaries where they can be resumed.

    Attributes:
      tree: which full blocks hold which tokens.
    """

    def __init__(self, tree: PrefixTree, blocks: BlockPool, pending: PendingChanges) -> None:
        """Starts without requests.

        Args:
          tree: empty.
          blocks: who holds which block.
          pending: what the device has not been told yet.
        """
        self.tree = tree
        self._blocks = blocks
        self._pending = pending
        self._requests: dict[int, RequestPrefix] = {}

    @property
    def slots(self) -> list[int]:
        """Slots of admitted requests."""
        return list(self._requests)

    def hashed(self, token_ids: np.ndarray | HashedTokens, salt: bytes) -> HashedTokens:
        """Tokens i32[n], each full block of which is hashed once; what is that already stays."""
        if isinstance(token_ids, HashedTokens):
            assert token_ids.salt == salt
            return token_ids
        return HashedTokens(token_ids, salt, self.tree.block_tokens)

    def find_resumable(
        self, token_ids: np.ndarray | HashedTokens | None, salt: bytes, max_tokens: int
    ) -> list[PrefixNode]:
        """The longest known prefix that ends at a snapshot, the last token left out.

        So many tokens must follow that snapshot as it asks for.
        """
        if token_ids is None or not self.tree.num_snapshots:
            return []
        most = max(len(token_ids) - 1, 0)
        size = self.tree.block_tokens
        chain = self.tree.match(self.hashed(token_ids, salt), min(most, max_tokens) // size)
        length, last = len(chain), most // size * size
        while length and not _resumes(chain[length - 1], last):
            length -= 1
        return chain[:length]

    def known_tokens(self, token_ids: np.ndarray | HashedTokens, salt: bytes = b"") -> int:
        """How many of these tokens, in whole blocks, the tree knows, resumable or not."""
        hashed = self.hashed(token_ids, salt)
        return len(self.tree.match(hashed, hashed.num_blocks)) * self.tree.block_tokens

    def hit_tokens(self, slot: int) -> int:
        """Tokens that a request was admitted with."""
        return self.of(slot).hit_tokens

    def is_exact_hit(self, slot: int) -> bool:
        """Whether all rings are what they should be where a request was admitted.

        It is asked before anything else happens to the tree.
        """
        chain = self.of(slot).chain
        return not chain or not chain[-1].must_follow

    def is_resumable(self, slot: int, token_ids: np.ndarray, must_follow: int = 0) -> bool:
        """Whether the tree has a snapshot at the end of `token_ids`, whole blocks of a request.

        One that more tokens must follow does not count.
        """
        prefix, size = self.of(slot), self.tree.block_tokens
        num_blocks = len(token_ids) // size
        first = min(len(prefix.chain), num_blocks)
        node = prefix.chain[first - 1] if first else None
        for logical in range(first, num_blocks):
            ids = token_ids[logical * size : (logical + 1) * size]
            content = BlockContent.after(node.key if node else None, ids, prefix.salt)
            node = self.tree.find_child(node, content)
            if node is None:
                return False
        return node is not None and node.snapshot >= 0 and node.must_follow <= must_follow

    def of(self, slot: int) -> RequestPrefix:
        """What an admitted request has in common with the tree.

        Raises:
          ValueError: the slot is free.
        """
        slot = checks.integer("slot", slot)
        if slot not in self._requests:
            checks.refuse("slot", "one that admit gave and release did not end", slot)
        return self._requests[slot]

    def start(self, slot: int, prefix: RequestPrefix) -> None:
        """A request has got a slot, and uses the nodes of its prefix."""
        self._requests[slot] = prefix
        self.tree.use(*prefix.chain)

    def branch(self, slot: int, num_full: int) -> RequestPrefix:
        """What a fork of a request, with so many full blocks, has in common with the tree."""
        prefix = self.of(slot)
        chain = prefix.chain[:num_full]
        if len(chain) < num_full:
            # Blocks of two tables that the tree does not know could not be evicted once it did.
            prefix.is_shareable = False
        return dataclasses.replace(prefix, hit_tokens=0, chain=chain)

    def end(self, slot: int) -> None:
        """A request gives its slot back; what the tree knows of it stays."""
        self.tree.leave(*self._requests.pop(slot).chain)

    def share(self, slot: int, table_row: np.ndarray, token_ids: np.ndarray) -> None:
        """Makes full blocks of a request known.

        Args:
          slot: the request.
          table_row: i32[n], its full blocks.
          token_ids: i32[m], tokens of at least those blocks.
        """
        if not self.tree.num_snapshots:
            return
        prefix, size = self.of(slot), self.tree.block_tokens
        while prefix.is_shareable and len(prefix.chain) < len(table_row):
            logical = len(prefix.chain)
            parent = prefix.chain[-1] if prefix.chain else None
            block = int(table_row[logical])
            ids = token_ids[logical * size : (logical + 1) * size]
            content = BlockContent.after(parent.key if parent else None, ids, prefix.salt)
            node = self.tree.find_child(parent, content)
            if node is None:
                node = self.tree.insert(parent, content, block)
                if node is None:
                    prefix.is_shareable = False
                    return
                self._blocks.hold(block)
            elif not node.users and node.block != block:
                # Nobody reads the older copy of the same tokens: keep the one in use.
                old, node.block = node.block, self._blocks.hold(block)
                self._blocks.drop_all(np.array([old], np.int32))
            self.tree.use(node)
            prefix.chain.append(node)

    def blocks_missing(self, first: int, count: int) -> int:
        """Known blocks that have to give way, at least, for so many from the b-th of a request."""
        return self._blocks.missing(first, count)

    def begin_snapshot(self) -> int:
        """A place in the store for a step to write; -1 if there is none.

        The least recently used snapshot gives way if it must; blocks never do. The place goes to
        `keep_snapshot` after the step.

        Raises:
          RuntimeError: a hit has not been applied; nothing was changed.
        """
        if self._pending.loads:
            raise RuntimeError("apply the hits first: a pending load may still read the place")
        return self.tree.take_snapshot_place()

    def keep_snapshot(self, slot: int, end: int, place: int, must_follow: int = 0) -> bool:
        """The step has written a place: a request's state at the boundary `end`.

        Args:
          slot: the request, its blocks shared up to `end`.
          end: tokens before the boundary.
          place: what `begin_snapshot` gave.
          must_follow: as in `PrefixNode`.

        Returns:
          Whether it is kept. It is given back if the blocks are not known to the tree, or if the
          boundary has one already that is worth as much, or if the step has not reached it.
        """
        node = self._node_at(slot, end) if slot in self._requests else None
        if node is None or (node.snapshot >= 0 and node.must_follow <= must_follow):
            self.tree.return_snapshot_place(place)
            return False
        self.tree.put_snapshot(node, place, must_follow)
        return True

    def demote_snapshot(self, slot: int, end: int) -> bool:
        """A boundary that only this request stands on is the next to give way, if places run out.

        Returns:
          Whether it has a snapshot, and only this request stands on it.

        Raises:
          ValueError: the slot is free.
        """
        node = self._node_at(slot, end)
        if node is None or node.users != 1 or node.snapshot < 0:
            return False
        self.tree.demote_snapshot(node)
        return True

    def bring_back(self, chain: list[PrefixNode], contents: Sequence[BlockContent]) -> list[int]:
        """Blocks of a known prefix that the caller will write, and uses until `leave`.

        Args:
          chain: nodes of all blocks before them, which the caller uses too; new ones are added.
          contents: of the blocks, in order.

        Returns:
          Where the first of them go, -1 for one that is there already. It ends where a key is
          another's, or no block is free beside one for each admitted request, which may need it
          meanwhile.
        """
        tree, num_known = self.tree, 0
        while num_known < len(contents):
            node = tree.find_child(chain[-1] if chain else None, contents[num_known])
            if node is None:
                break
            tree.use(node)
            chain.append(node)
            num_known += 1
        new = contents[num_known:]
        count = next((n for n, content in enumerate(new) if tree.has(content.key)), len(new))
        rows = self._blocks.take_many(len(chain), count, len(self._requests))
        tree.insert_used(chain, new[: len(rows)], rows)
        return [-1] * num_known + rows

    def drop_snapshot(self, place: int) -> None:
        """Gives back a place that no step has written."""
        self.tree.return_snapshot_place(place)

    def _node_at(self, slot: int, end: int) -> PrefixNode | None:
        """The node of a request's chain that ends at a boundary."""
        chain, logical = self.of(slot).chain, end // self.tree.block_tokens - 1
        return chain[logical] if 0 <= logical < len(chain) else None


def _resumes(node: PrefixNode, last: int) -> bool:
    """Whether one resumes at a node whose last boundary is at so many tokens."""
    return node.snapshot >= 0 and last - node.end >= node.must_follow
