"""KVCacheManager: who holds which slot and blocks, on the host, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4_jax import checks
from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.allocator.block_pool import BlockPool
from dsv4_jax.allocator.leaving import Room
from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.allocator.pending_changes import PendingChanges
from dsv4_jax.allocator.pool_plan import PoolPlan, plan_pools
from dsv4_jax.allocator.prefix_cache import PrefixCache, RequestPrefix
from dsv4_jax.allocator.prefix_tree import PrefixNode, PrefixTree
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.original import OriginalHandle, acquire, check_acquirable
from dsv4_jax.cache.schema import FormatName
from dsv4_jax.cache.slot_changes import SlotChanges, jit_apply_changes, set_tables
from dsv4_jax.cache.snapshots import SnapshotStore, check_store
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config


class NoRoomError(RuntimeError):
    """No slot, or too few blocks, are free now; nothing was changed."""


class KVCacheManager:
    """Admits, extends, forks, shares, evicts and releases.

    It keeps its own lengths and tables by arithmetic and never reads the device. A request holds
    the blocks that `admit` and `extend` gave it, so that no step needs to allocate and none can
    fail for lack of blocks. Every method plans first: one that raises has changed nothing, unless
    it was interrupted: then a new manager is needed. Changes reach the device through `apply`,
    between steps.

    A block is held by the tables it is in and by the prefix tree, and is free when nobody holds
    it. Blocks that only the tree holds are a cache of prefixes and give way to requests, least
    recently used first.

    Attributes:
      plan: sizes of the pools.
      length_tokens: i32[NS], tokens of each slot's request.
      block_table: i32[NS, LB], as the device has it after `apply`.
      prefixes: what requests share, and where they can be resumed.
    """

    def __init__(
        self,
        config: DSV4Config,
        *,
        max_requests: int,
        max_context_tokens: int,
        num_blocks: int | None = None,
        num_snapshots: int | None = None,
        cache_format: FormatName | None = None,
        poison: bool = False,
        block_parts: int = 1,
    ) -> None:
        """Starts with every slot and block free.

        Args:
          config: the model.
          max_requests: NS, slots.
          max_context_tokens: longest context of a request.
          num_blocks: physical blocks; None is enough for `max_requests` full contexts.
          num_snapshots: boundaries that can be resumed at, as in `plan_pools`; 0 shares no
            prefixes.
          cache_format: as in `init_cache`; only `plan` reads it, for its bytes.
          poison: `apply` fills freed slots and blocks with NaN patterns, for tests and debugging.
          block_parts: devices of the data shard that blocks are dealt over, where a cache is split;
            it divides `num_blocks`.

        Raises:
          ValueError: a size is out of range.
        """
        self.plan: PoolPlan = plan_pools(
            config,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            num_blocks=num_blocks,
            num_snapshots=num_snapshots,
            cache_format=cache_format,
            block_parts=block_parts,
        )
        max_requests = self.plan.max_requests
        width = -(-self.plan.max_context_tokens // self.plan.block_tokens)
        self.length_tokens = np.zeros(max_requests, np.int32)
        self.block_table = np.full((max_requests, width), -1, np.int32)
        self._poison = checks.flag("poison", poison)
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._slot_generations = np.zeros(max_requests, np.int32)
        tree = PrefixTree(self.plan.block_tokens, self.plan.num_snapshots, self.plan.block_parts)
        self._blocks = BlockPool(self.plan.num_blocks, tree)
        self._pending = PendingChanges()
        self.prefixes = PrefixCache(tree, self._blocks, self._pending)

    @property
    def num_blocks(self) -> int:
        """NB."""
        return self.plan.num_blocks

    @property
    def owners(self) -> np.ndarray:
        """i32[NB], how many tables and nodes of the prefix tree hold each block."""
        return self._blocks.owners

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, those of cached prefixes included."""
        return self._blocks.num_free

    @property
    def num_evicted(self) -> int:
        """Blocks of cached prefixes that gave way so far."""
        return self._blocks.num_evicted

    @property
    def num_cached_blocks(self) -> int:
        """Blocks of cached prefixes that no request holds."""
        return self.prefixes.tree.num_unused

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free_slots)

    def can_admit(
        self,
        max_tokens: int,
        token_ids: np.ndarray | HashedTokens | None = None,
        salt: bytes = b"",
        *,
        spare_blocks: int = 0,
    ) -> bool:
        """Whether `admit` would succeed right now, and leave `spare_blocks` free.

        Raises:
          ValueError: it never would.
        """
        needed = self.plan.blocks_needed(max_tokens)
        spare_blocks = checks.integer("spare_blocks", spare_blocks, 0)
        _check_prefix(token_ids, salt)
        chain = self.prefixes.find_resumable(token_ids, salt, max_tokens)
        left = self._blocks.left_beside(chain, len(chain), needed)
        return bool(self._free_slots) and min(left) >= 0 and sum(left) >= spare_blocks

    def admit(
        self,
        max_tokens: int,
        token_ids: np.ndarray | HashedTokens | None = None,
        salt: bytes = b"",
    ) -> int:
        """Gives a request a slot and every block it may need.

        Args:
          max_tokens: the most tokens it will hold until `extend`.
          token_ids: i32[n], its prompt: the longest known prefix with a snapshot is shared, up to
            `max_tokens`, but never the last token, which has to be run. `length_tokens[slot]` says
            how far it goes.
          salt: prefixes are shared among requests of one salt only.

        Returns:
          Its slot.

        Raises:
          ValueError: no context is that long; nothing was changed.
          NoRoomError: no slot, or too few blocks, are free now; nothing was changed.
        """
        needed = self.plan.blocks_needed(max_tokens)
        _check_prefix(token_ids, salt)
        self._check_free_slot()
        chain = self.prefixes.find_resumable(token_ids, salt, max_tokens)
        self._check_free(len(chain), needed, chain)
        hit_tokens = len(chain) * self.plan.block_tokens
        prefix = RequestPrefix(salt=salt, hit_tokens=hit_tokens, chain=chain)
        slot = self._start(hit_tokens, prefix, [node.block for node in chain], needed)
        if chain:
            self._pending.loads[slot] = (chain[-1].snapshot, hit_tokens)
        return slot

    def extend(self, slot: int, max_tokens: int) -> None:
        """Raises the most tokens that an admitted request may hold.

        Raises:
          ValueError: the slot is free, or no context is that long; nothing was changed.
          NoRoomError: too few blocks are free now; nothing was changed.
        """
        self._check_held(slot)
        held = self._num_blocks_of(slot)
        needed = self.plan.blocks_needed(max_tokens)
        self._check_free(held, needed)
        if needed > held:
            self._take(slot, held, needed)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Counts tokens that a step has appended; the device counts them by itself.

        Raises:
          ValueError: the slot is free, or its blocks do not hold that many tokens.
        """
        self._check_held(slot)
        num_tokens = checks.integer("num_tokens", num_tokens, -checks.INT32_MAX)
        length = int(self.length_tokens[slot]) + num_tokens
        capacity = self._num_blocks_of(slot) * self.plan.block_tokens
        if not 0 <= num_tokens <= length <= capacity:
            raise ValueError(
                f"num_tokens must leave slot {slot} within its {capacity} reserved tokens, got "
                f"{num_tokens} for a length of {length - num_tokens}; extend it first"
            )
        self.length_tokens[slot] = length

    def fork(self, slot: int, max_tokens: int) -> int:
        """A second request with the same tokens: full blocks shared, the open one copied.

        Args:
          slot: the request.
          max_tokens: the most tokens that the new one will hold, those it starts with included.

        Returns:
          Slot of the new request.

        Raises:
          ValueError: the slot is free, or `max_tokens` is out of range; nothing was changed.
          NoRoomError: no slot, or too few blocks, are free now; nothing was changed.
        """
        self._check_held(slot)
        length = int(self.length_tokens[slot])
        full, open_tokens = divmod(length, self.plan.block_tokens)
        needed = self.plan.blocks_needed(max_tokens)
        if max_tokens < length:
            raise ValueError(f"max_tokens must be at least the length, {length}, got {max_tokens}")
        self._check_free_slot()
        self._check_free(full, needed)
        prefix = self.prefixes.branch(slot, full)
        new = self._start(length, prefix, self.block_table[slot, :full].tolist(), needed)
        if length:
            blocks = self.block_table[[slot, new], full] if open_tokens else (-1, -1)
            self._pending.copy(slot, new, int(blocks[0]), int(blocks[1]))
        return new

    def release(self, slot: int) -> None:
        """Takes a request's slot and blocks back; blocks of a known prefix stay cached.

        Raises:
          ValueError: the slot is free already.
        """
        self._check_held(slot)
        self.prefixes.end(slot)
        self._blocks.drop_all(self.block_table[slot, : self._num_blocks_of(slot)])
        self.block_table[slot] = -1
        self.length_tokens[slot] = 0
        self._free_slots.append(slot)
        self._pending.release(slot)

    def share(self, slot: int, token_ids: np.ndarray) -> None:
        """Makes a request's full blocks known, for others to share.

        Args:
          slot: the request.
          token_ids: i32[n], its tokens; at least `length_tokens[slot]`.

        Raises:
          ValueError: the slot is free, or there are too few tokens; nothing was changed.
        """
        self._check_held(slot)
        length = int(self.length_tokens[slot])
        _check_prefix(token_ids, b"")
        if len(token_ids) < length:
            raise ValueError(
                f"token_ids must be all {length} tokens of slot {slot}, got {len(token_ids)}"
            )
        full_blocks = self.block_table[slot, : length // self.plan.block_tokens]
        self.prefixes.share(slot, full_blocks, token_ids)

    def evict(self, num_blocks: int, room: Room | None = None) -> int:
        """Frees up to so many blocks of cached prefixes, least recently used first.

        Returns:
          How many were freed; none that would not fit into `room`, where that is given.

        Raises:
          ValueError: the number is negative.
        """
        num_blocks = checks.integer("num_blocks", num_blocks, 0, rule="0 or more")
        return self._blocks.evict(num_blocks, room)

    @property
    def moves_arrays(self) -> bool:
        """Whether what the device has not been told moves more than tables and lengths."""
        return bool(self._poison or self._pending.loads or self._pending.copies)

    def take_changes(self) -> SlotChanges | None:
        """What the device has to be told, once; None if nothing."""
        freed, self._blocks.freed = self._blocks.freed, set()
        return self._pending.take(
            self.length_tokens, self.block_table, freed if self._poison else None, self.num_blocks
        )

    def apply(self, cache: ModelCache, store: SnapshotStore | None = None) -> ModelCache:
        """Brings the device up to date; no wait, one shape for any change.

        Where only tables and lengths change, the cache's other arrays are passed on; copies, loads
        and poison donate them.

        Args:
          cache: between steps.
          store: the snapshots; forks, prefix hits and poison need it.

        Raises:
          ValueError: the cache is not of the plan's sizes, or the store is missing, too small or
            another cache's; nothing was changed.
        """
        self.plan.check_pools(cache, store)
        if not self.moves_arrays:
            changes = self.take_changes()
            return cache if changes is None else set_tables(cache, changes)
        if store is None:
            raise ValueError("store must be given: forks, prefix hits and poison need it")
        check_store(store, cache.state)
        if self._pending.loads and store.num_snapshots < self.plan.num_snapshots:
            raise ValueError(
                f"store must have num_snapshots={self.plan.num_snapshots} places, which prefix "
                f"hits load from, got {store.num_snapshots}"
            )
        changes = self.take_changes()
        return cache if changes is None else jit_apply_changes(cache, store, changes)

    def ledger(self) -> Ledger:
        """Who holds what, as a value, for `verify_cache`."""
        tree = self.prefixes.tree
        return Ledger(
            length_tokens=self.length_tokens.copy(),
            block_table=self.block_table.copy(),
            held_slots=np.isin(np.arange(len(self.length_tokens)), self.prefixes.slots),
            free_blocks=np.array(sorted(self._blocks.free), np.int32),
            cached_blocks=np.array([node.block for node in tree.nodes], np.int32),
            owners=self._blocks.owners.copy(),
            num_unused=tree.num_unused,
            block_generations=self._blocks.generations.copy(),
            slot_generations=self._slot_generations.copy(),
            snapshot_ends=tree.snapshot_ends,
            snapshot_generations=tree.snapshot_generations.copy(),
        )

    @staticmethod
    def acquire(cache: ModelCache, step_input: StepInput, *, layer_idx: int) -> OriginalHandle:
        """The handle of one layer in one call; pure, for use inside a traced step.

        Raises:
          ValueError: a layer, or what `step_input` names, is not there, or the cache is split.
        """
        check_acquirable(cache)
        cache.check_input(step_input, vocab_size=None)
        return acquire(cache, cache.index(step_input), layer_idx=layer_idx)

    def _check_free(self, held: int, needed: int, chain: Sequence[PrefixNode] = ()) -> None:
        if needed > held and (shortage := self._blocks.shortage(chain, held, needed)):
            raise NoRoomError(
                f"{needed - held} blocks of {self.plan.block_tokens} tokens are needed and "
                f"{shortage}; release a request first"
            )

    def _check_free_slot(self) -> None:
        if not self._free_slots:
            raise NoRoomError(f"all {len(self.length_tokens)} slots are taken; release one first")

    def _check_held(self, slot: int) -> None:
        self.prefixes.of(slot)  # raises for a slot that no request has

    def _num_blocks_of(self, slot: int) -> int:
        return int(np.count_nonzero(self.block_table[slot] >= 0))

    def _start(self, length: int, prefix: RequestPrefix, shared: Sequence[int], needed: int) -> int:
        """A slot for a request of that length, with blocks that it shares, up to what it needs."""
        slot = self._free_slots.pop()
        self._slot_generations[slot] += 1
        self.length_tokens[slot] = length
        self.block_table[slot] = -1
        self.prefixes.start(slot, prefix)
        blocks = np.array(shared, np.int32)
        self._blocks.hold_all(blocks)
        self.block_table[slot, : len(blocks)] = blocks
        self._take(slot, len(shared), needed)
        return slot

    def _take(self, slot: int, held: int, needed: int) -> None:
        for logical in range(held, needed):
            self.block_table[slot, logical] = self._blocks.take(logical)
        self._pending.changed.add(slot)


def _check_prefix(token_ids: np.ndarray | HashedTokens | None, salt: bytes) -> None:
    if token_ids is not None and not isinstance(token_ids, HashedTokens):
        checks.array("token_ids", token_ids, (None,))
    if not isinstance(salt, bytes):
        checks.refuse("salt", "bytes", salt)
