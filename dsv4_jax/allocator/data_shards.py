"""DataShards: a manager for each data shard of a mesh, and who of them takes a request."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.pending_changes import idle_changes
from dsv4_jax.allocator.pool_plan import PoolPlan
from dsv4_jax.cache.schema import FormatName
from dsv4_jax.cache.slot_changes import SlotChanges
from dsv4_jax.config import DSV4Config


class DataShards:
    """Managers of equal sizes; slots are numbered through all of them.

    Slot s is slot s % n of shard s // n, where each has n. A request's slot, blocks and snapshots
    all lie on one shard, and ids of blocks and snapshots are those within it. One device is one
    shard.

    Attributes:
      managers: one for each data shard.
    """

    def __init__(self, managers: Sequence[KVCacheManager]) -> None:
        """Takes managers without requests, one for each shard, of equal sizes."""
        self.managers = tuple(managers)
        self._num_slots = self.managers[0].plan.max_requests

    @classmethod
    def planned(
        cls,
        count: int,
        config: DSV4Config,
        plan: PoolPlan,
        *,
        cache_format: FormatName,
        poison: bool,
    ) -> DataShards:
        """So many shards of a plan, without requests.

        Args:
          count: data shards.
          config: the model.
          plan: sizes of one.
          cache_format: as in `KVCacheManager`.
          poison: the same.
        """
        return cls(
            [
                KVCacheManager(
                    config,
                    max_requests=plan.max_requests,
                    max_context_tokens=plan.max_context_tokens,
                    num_blocks=plan.num_blocks,
                    num_snapshots=plan.num_snapshots,
                    cache_format=cache_format,
                    poison=poison,
                    block_parts=plan.block_parts,
                )
                for _ in range(count)
            ]
        )

    @property
    def num_slots(self) -> int:
        """Slots of all shards."""
        return self._num_slots * len(self.managers)

    @property
    def num_evicted(self) -> tuple[int, int]:
        """Blocks and snapshots that have given way so far, of all shards."""
        blocks = snapshots = 0
        for manager in self.managers:
            blocks += manager.num_evicted
            snapshots += manager.prefixes.tree.num_evicted_snapshots
        return blocks, snapshots

    @property
    def length_tokens(self) -> np.ndarray:
        """i32[shards * NS], tokens of each slot's request."""
        return np.concatenate([manager.length_tokens for manager in self.managers])

    def shard_of(self, slot: int) -> int:
        """The number of the shard that a slot lies on."""
        return slot // self._num_slots

    def of(self, slot: int) -> tuple[KVCacheManager, int]:
        """The manager of a slot, and its number there."""
        shard, own = divmod(slot, self._num_slots)
        return self.managers[shard], own

    def length_of(self, slot: int) -> int:
        """Tokens of a slot's request."""
        manager, own = self.of(slot)
        return int(manager.length_tokens[own])

    def advance(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Counts tokens that a step has appended, for which blocks were reserved before it.

        Args:
          slots: i32[n], no slot twice.
          num_tokens: i32[n], of each.
        """
        shards, own = np.divmod(slots, self._num_slots)
        for shard, manager in enumerate(self.managers):
            mine = shards == shard
            manager.length_tokens[own[mine]] += num_tokens[mine]

    def choose(
        self,
        max_tokens: int,
        token_ids: np.ndarray | HashedTokens | None,
        salt: bytes,
        *,
        spare_blocks: Sequence[int],
    ) -> int | None:
        """The shard that takes a request now, None if none can.

        It is the one that has the longest prefix to resume at, and of several the one with most
        free blocks, then with most free slots, then the first.

        Args:
          max_tokens: the most tokens that the request will hold until `extend`.
          token_ids: i32[n], its prompt; None shares no prefix.
          salt: as in `KVCacheManager.admit`.
          spare_blocks: blocks that must stay free, of each shard.

        Raises:
          ValueError: no shard ever could.
        """
        fitting = [
            shard
            for shard, spare in enumerate(spare_blocks)
            if self.managers[shard].can_admit(max_tokens, token_ids, salt, spare_blocks=spare)
        ]
        if len(fitting) < 2:
            return fitting[0] if fitting else None

        def room(shard: int) -> tuple[int, int, int, int]:
            manager = self.managers[shard]
            chain = manager.prefixes.find_resumable(token_ids, salt, max_tokens)
            return len(chain), manager.num_free_blocks, manager.num_free_slots, -shard

        return max(fitting, key=room)

    def admit(
        self,
        shard: int,
        max_tokens: int,
        token_ids: np.ndarray | HashedTokens | None,
        salt: bytes,
    ) -> int:
        """`KVCacheManager.admit` on a shard; the slot's number among all."""
        own = self.managers[shard].admit(max_tokens, token_ids, salt)
        return shard * self._num_slots + own

    def fork(self, slot: int, max_tokens: int) -> int:
        """`KVCacheManager.fork`; the new request is on the shard of the old one."""
        manager, own = self.of(slot)
        return self.shard_of(slot) * self._num_slots + manager.fork(own, max_tokens)

    def take_changes(self) -> tuple[SlotChanges | None, bool]:
        """What the devices have to be told, once, each shard's after the other; None if nothing.

        Also whether it moves arrays, as forks, prefix hits and poison do; else tables and lengths
        are all that changes.
        """
        moves = any([manager.moves_arrays for manager in self.managers])
        changes = [manager.take_changes() for manager in self.managers]
        told = [one for one in changes if one is not None]
        if not told:
            return None, False
        some = told[0]
        if len(changes) == 1:
            return some, moves
        blocks = None if some.freed_blocks is None else len(some.freed_blocks)
        idle = idle_changes(*some.block_table.shape, num_blocks=blocks)  # type: ignore[misc]
        filled = [idle if one is None else one for one in changes]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *filled), moves

    def ledgers(self) -> tuple[Ledger, ...]:
        """Who holds what on each shard, for `verify_cache`."""
        return tuple(manager.ledger() for manager in self.managers)
