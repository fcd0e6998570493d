"""Ledger: who holds what, as a value."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """Who holds which slot and block.

    Attributes:
      length_tokens: i32[NS].
      block_table: i32[NS, LB].
      held_slots: bool[NS], slots of admitted requests.
      free_blocks: i32[n], blocks that nobody holds.
      cached_blocks: i32[n], blocks that the prefix tree holds.
      owners: i32[NB], how many tables and tree nodes hold each block.
      num_unused: tree nodes that no request uses.
      block_generations: i32[NB], how often each block has been taken from the free ones.
      slot_generations: i32[NS], how often each slot has been given to a request.
      snapshot_ends: i32[n], boundary of each place in the snapshot store; -1 where it holds none.
      snapshot_generations: i32[n], how often each place has been written.
    """

    length_tokens: np.ndarray
    block_table: np.ndarray
    held_slots: np.ndarray
    free_blocks: np.ndarray
    cached_blocks: np.ndarray
    owners: np.ndarray
    num_unused: int
    block_generations: np.ndarray
    slot_generations: np.ndarray
    snapshot_ends: np.ndarray
    snapshot_generations: np.ndarray
