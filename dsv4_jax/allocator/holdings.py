"""What a request holds, to look at."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4_jax.allocator.manager import KVCacheManager


class Holdings(NamedTuple):
    """The blocks of one request.

    Attributes:
      num_blocks: how many there are, those for tokens to come too.
      blocks: i32[n], the first of them, in order.
      users: i32[n], how many requests hold each, this one included.
    """

    num_blocks: int
    blocks: np.ndarray
    users: np.ndarray


def holdings_of(manager: KVCacheManager, slot: int, most: int) -> Holdings:
    """The first `most` blocks of a request.

    Raises:
      ValueError: the slot is free.
    """
    chain = manager.prefixes.of(slot).chain[:most]
    num_blocks = int(np.count_nonzero(manager.block_table[slot] >= 0))
    blocks = manager.block_table[slot, : min(num_blocks, most)].copy()
    users = manager.owners[blocks]
    # The prefix tree is an owner too; it may have another copy of a block's tokens.
    cached = np.fromiter((node.block for node in chain), np.int32, len(chain))
    users[: len(cached)] -= cached == blocks[: len(cached)]
    return Holdings(num_blocks, blocks, users)
