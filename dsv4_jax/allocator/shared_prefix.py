"""History: what an admitted request has in common with the prefix tree."""

from __future__ import annotations

import dataclasses

import numpy as np

from dsv4_jax.allocator.block_pool import BlockOwners
from dsv4_jax.allocator.prefix_tree import PrefixNode, PrefixTree


@dataclasses.dataclass
class History:
    """The known part of a request's history, beside its table row.

    Attributes:
      salt: histories of different salts share nothing.
      hit_tokens: tokens that the request was admitted with.
      chain: nodes of its first full blocks, which it uses.
      is_shareable: further blocks may become known.
    """

    salt: bytes
    hit_tokens: int
    chain: list[PrefixNode] = dataclasses.field(default_factory=list)
    is_shareable: bool = True

    def share(
        self, tree: PrefixTree, blocks: BlockOwners, row: np.ndarray, token_ids: np.ndarray
    ) -> None:
        """Makes full blocks known.

        Args:
          tree: that will know them.
          blocks: who holds them.
          row: i32[n], the request's full blocks.
          token_ids: i32[m], tokens of at least those blocks.
        """
        size = tree.block_tokens
        while self.is_shareable and len(self.chain) < len(row):
            logical = len(self.chain)
            parent, block = self.chain[-1] if self.chain else None, int(row[logical])
            ids = token_ids[logical * size : (logical + 1) * size]
            node = tree.find_child(parent, ids, self.salt)
            if node is None:
                node = tree.insert(parent, ids, self.salt, block)
                if node is None:
                    self.is_shareable = False
                    return
                blocks.hold(block)
            elif not node.users and node.block != block:
                # Nobody reads the older copy of the same tokens: keep the one in use.
                old, node.block = node.block, blocks.hold(block)
                blocks.drop(old)
            tree.use(node)
            self.chain.append(node)

    def find(self, tree: PrefixTree, token_ids: np.ndarray) -> PrefixNode | None:
        """The node at the end of these tokens, whole blocks that the request holds or will."""
        size, node = tree.block_tokens, None
        for logical in range(len(token_ids) // size):
            if logical < len(self.chain):
                node = self.chain[logical]
                continue
            ids = token_ids[logical * size : (logical + 1) * size]
            node = tree.find_child(node, ids, self.salt)
            if node is None:
                return None
        return node
