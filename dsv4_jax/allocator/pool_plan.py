"""PoolPlan: how many slots, blocks and snapshots there are, and what a request takes of them.

The same arithmetic sizes the pools at start-up and decides admission, so that the two cannot
disagree: `PoolPlan.blocks_needed` counts the tokens a request holds and those in flight.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from dsv4_jax import checks
from dsv4_jax.cache.empty_cache import init_cache
from dsv4_jax.cache.model_cache import ModelCache, tree_bytes
from dsv4_jax.cache.schema import FormatName, blocks_of, choose_cache_format
from dsv4_jax.cache.snapshots import SnapshotStore, init_snapshot_store
from dsv4_jax.config import DSV4Config

SNAPSHOTS_PER_SLOT = 8
"""Boundaries that can be resumed at, for every slot, where no number and no budget is given."""

SNAPSHOT_SHARE = 0.1
"""What they take of a budget, beside the slots, where no number is given."""

_MAX_PARTS = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Sizes of the pools.

    Attributes:
      max_requests: NS, slots.
      max_context_tokens: most tokens of a request, prompt and answer.
      block_tokens: tokens of a block.
      num_blocks: NB, physical blocks.
      num_snapshots: boundaries that can be resumed at.
      bytes_per_slot: rings, compressor states, length and table row.
      bytes_per_block: entries and index keys of all layers.
      bytes_per_snapshot: window rows and compressor states of one snapshot.
      block_parts: devices that the blocks of a request are dealt over, and `num_blocks` lie on in
        equal parts; 1 where a cache is not split.
    """

    max_requests: int
    max_context_tokens: int
    block_tokens: int
    num_blocks: int
    num_snapshots: int
    bytes_per_slot: int
    bytes_per_block: int
    bytes_per_snapshot: int
    block_parts: int = 1

    @property
    def memory_bytes(self) -> int:
        """Bytes of all pools on a device."""
        return (
            self.max_requests * self.bytes_per_slot
            + self.num_blocks // self.block_parts * self.bytes_per_block
            + self.num_snapshots * self.bytes_per_snapshot
        )

    def blocks_needed(self, tokens: int, in_flight_tokens: int = 0) -> int:
        """Blocks for a request that holds `tokens` and is about to append `in_flight_tokens`.

        Raises:
          ValueError: no context is that long, or all blocks together are too few.
        """
        total = checks.integer("max_tokens", tokens, high=None)
        total += checks.integer("in_flight_tokens", in_flight_tokens, 0, None)
        if not 1 <= total <= self.max_context_tokens:
            raise ValueError(
                f"max_tokens must be 1..{self.max_context_tokens} (max_context_tokens), "
                f"got {checks.shown(total)}; shorten the request or build a larger cache"
            )
        needed = -(-total // self.block_tokens)
        if needed > self.num_blocks:
            raise ValueError(
                f"{total} tokens take {needed} blocks of {self.block_tokens} tokens, and the cache "
                f"has {self.num_blocks}; shorten the request or build a larger cache"
            )
        return needed

    def check_pools(self, cache: ModelCache, store: SnapshotStore | None) -> None:
        """Refuses a cache whose slots and blocks are others than these, and what is no store.

        Raises:
          ValueError: one is no such object, or the cache's arrays are gone, or it has other sizes
            or fewer blocks.
        """
        if store is not None:
            checks.instance("store", store, SnapshotStore)
        checks.instance("cache", cache, ModelCache)
        checks.not_deleted("cache", cache)
        num_blocks = cache.num_blocks if cache.paged else self.num_blocks
        width = -(-self.max_context_tokens // self.block_tokens)
        wanted = (self.max_requests, width, self.block_tokens)
        found = (*cache.block_table.shape, cache.block_tokens)
        if found != wanted or num_blocks < self.num_blocks:
            raise ValueError(
                "cache must have the slots, blocks of a context, tokens of a block and blocks of "
                f"the plan, {(*wanted, self.num_blocks)}, got {(*found, num_blocks)}"
            )


def plan_pools(
    config: DSV4Config,
    *,
    max_requests: int,
    max_context_tokens: int,
    cache_format: FormatName | None = None,
    num_blocks: int | None = None,
    num_snapshots: int | None = None,
    memory_bytes: int | None = None,
    block_parts: int = 1,
) -> PoolPlan:
    """Sizes the pools, from counts or from a memory budget.

    Args:
      config: the model.
      max_requests: NS.
      max_context_tokens: longest context of a request.
      cache_format: as in `init_cache`.
      num_blocks: NB; None takes what the budget leaves or, without one, full contexts in all
        slots.
      num_snapshots: None takes `SNAPSHOT_SHARE` of what a budget leaves after the slots or,
        without one, `SNAPSHOTS_PER_SLOT` for every slot.
      memory_bytes: budget of all pools together, on a device; None is no limit.
      block_parts: devices that the blocks of a request are dealt over, which must divide
        `num_blocks`; 1 where a cache is not split.

    Returns:
      The plan; nothing is allocated.

    Raises:
      ValueError: a size is out of range, or the budget does not hold one full context.
    """
    checks.instance("config", config, DSV4Config)
    max_requests = checks.integer("max_requests", max_requests, 1)
    max_context_tokens = checks.integer("max_context_tokens", max_context_tokens, 1)
    block_parts = checks.integer("block_parts", block_parts, 1, _MAX_PARTS)
    if num_blocks is not None:
        num_blocks = checks.integer("num_blocks", num_blocks, 1)
        if num_blocks % block_parts:
            rule = f"a multiple of block_parts={block_parts}"
            checks.refuse("num_blocks", rule, num_blocks)
    if num_snapshots is not None:
        num_snapshots = checks.integer("num_snapshots", num_snapshots, 0)
    if memory_bytes is not None:
        memory_bytes = checks.integer("memory_bytes", memory_bytes, 0, 2**62)
    cache_format = choose_cache_format(config, cache_format)
    width = -(-blocks_of(config, max_context_tokens) // block_parts)  # on a device
    # Block ids are i32; a budget may still ask for fewer blocks than full contexts take.
    if num_blocks is None and memory_bytes is None:
        checks.integer("max_requests", max_requests, high=checks.INT32_MAX // (width * block_parts))
    per_slot, per_block, per_snapshot = _unit_bytes(config, max_context_tokens, cache_format)
    if memory_bytes is not None:
        left = memory_bytes - max_requests * per_slot
        if num_snapshots is None:
            num_snapshots = max(int(left * SNAPSHOT_SHARE) // per_snapshot, 0)
        left -= num_snapshots * per_snapshot
        # A cache without compressed layers has no blocks to pay for.
        own_blocks = left // per_block if per_block else max_requests * width
        if num_blocks is None:
            num_blocks = own_blocks * block_parts
        own_blocks = max(num_blocks // block_parts, width)
        needed = own_blocks * per_block
        if needed > left:
            raise ValueError(
                f"memory_bytes={memory_bytes} is too little: {max_requests} slots of {per_slot} "
                f"bytes, {num_snapshots} snapshots of {per_snapshot} and "
                f"{own_blocks} blocks of {per_block} take "
                f"{memory_bytes - left + needed}; give more, or lower max_requests or "
                "max_context_tokens"
            )
    return PoolPlan(
        max_requests=max_requests,
        max_context_tokens=max_context_tokens,
        block_tokens=config.block_tokens,
        num_blocks=max_requests * width * block_parts if num_blocks is None else num_blocks,
        num_snapshots=SNAPSHOTS_PER_SLOT * max_requests if num_snapshots is None else num_snapshots,
        bytes_per_slot=per_slot,
        bytes_per_block=per_block,
        bytes_per_snapshot=per_snapshot,
        block_parts=block_parts,
    )


def device_memory_bytes(fraction: float) -> int:
    """Bytes that a fraction of the first device's memory leaves beside what is in use now.

    Raises:
      ValueError: the fraction is out of range, or the device does not say what it has.
    """
    fraction = checks.share("gpu_memory_fraction", fraction)
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ValueError(
            f"gpu_memory_fraction needs a device that reports its memory, and "
            f"{jax.local_devices()[0]} does not; give memory_bytes or num_blocks"
        )
    return int(stats["bytes_limit"] * fraction) - int(stats.get("bytes_in_use", 0))


def _unit_bytes(
    config: DSV4Config, max_context_tokens: int, cache_format: FormatName
) -> tuple[int, int, int]:
    """Bytes of one slot, one block and one snapshot; of these a context sizes a slot's table."""
    per_slot, per_block, per_snapshot = _bytes_with_one_block(config, cache_format)
    others = blocks_of(config, max_context_tokens) - 1
    return per_slot + others * np.dtype(np.int32).itemsize, per_block, per_snapshot


@functools.cache
def _bytes_with_one_block(config: DSV4Config, cache_format: FormatName) -> tuple[int, int, int]:
    """The same for contexts of a block, from the shapes that would be allocated."""

    def build() -> ModelCache:
        return init_cache(
            config,
            max_requests=1,
            max_context_tokens=config.block_tokens,
            cache_format=cache_format,
            num_blocks=1,
        )

    cache = jax.eval_shape(build)
    store = jax.eval_shape(lambda: init_snapshot_store(build(), 1))
    per_slot = tree_bytes((cache.state, cache.length_tokens, cache.block_table))
    return per_slot, tree_bytes(cache.paged), tree_bytes(store)
