"""What leaves a prefix tree, and how much may."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_jax.allocator.block_contents import BlockContent


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


class Room(NamedTuple):
    """How many bytes may leave at most, and what a block and a snapshot take of them."""

    num_bytes: int
    block_bytes: int
    snapshot_bytes: int
