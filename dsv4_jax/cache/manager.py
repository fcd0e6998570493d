"""KVCacheManager: who holds which slot and blocks, on the host, in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache, update_slots
from dsv4_jax.cache.schema import blocks_of, compute_block_budget
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.layer_schedule import layer_schedule


class KVCacheManager:
    """Admits, extends and releases requests.

    It keeps its own lengths and tables by arithmetic and never reads the device. Admission takes
    every block a request may ever need, so that what was admitted cannot fail later. Changes reach
    the device through `apply`, between steps.

    Attributes:
      length_tokens: i32[NS], tokens of each slot's request.
      block_table: i32[NS, LB], as the device has it after `apply`.
    """

    def __init__(
        self,
        config: DSV4Config,
        *,
        max_requests: int,
        max_context_tokens: int,
        num_blocks: int | None = None,
    ) -> None:
        """Starts with every slot and block free.

        Args:
          config: the model.
          max_requests: NS, slots.
          max_context_tokens: longest context of a request.
          num_blocks: physical blocks; None is enough for `max_requests` full contexts.
        """
        budget = compute_block_budget(
            config, layer_schedule(config), max_context_tokens, max_requests, headroom=0.0
        )
        width = blocks_of(config, max_context_tokens)
        if num_blocks is None:
            num_blocks = max(budget.values()) or max_requests * width
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._changed: set[int] = set()
        self.num_blocks = num_blocks
        self.length_tokens = np.zeros(max_requests, np.int32)
        self.block_table = np.full((max_requests, width), -1, np.int32)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return len(self._free_blocks)

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free_slots)

    def can_admit(self, max_tokens: int) -> bool:
        """Whether a request of at most `max_tokens` tokens, prompt and answer, fits right now."""
        needed = self._blocks_needed(max_tokens)
        return bool(self._free_slots) and needed <= self.num_free_blocks

    def admit(self, max_tokens: int) -> int:
        """Gives a request a slot and every block it may need.

        Args:
          max_tokens: the most tokens it will ever hold, prompt and answer.

        Returns:
          Its slot.

        Raises:
          ValueError: no context is that long; nothing was changed.
          RuntimeError: no slot, or too few blocks, are free now; nothing was changed.
        """
        needed = self._blocks_needed(max_tokens)
        if not self._free_slots:
            raise RuntimeError(f"all {len(self.length_tokens)} slots are taken; release one first")
        self._check_free(needed)
        slot = self._free_slots.pop()
        self.length_tokens[slot] = 0
        self.block_table[slot] = -1
        self._take(slot, 0, needed)
        return slot

    def extend(self, slot: int, max_tokens: int) -> None:
        """Raises the most tokens that an admitted request may hold.

        Raises:
          ValueError: the slot is free, or no context is that long; nothing was changed.
          RuntimeError: too few blocks are free now; nothing was changed.
        """
        self._check_held(slot)
        held = int(np.sum(self.block_table[slot] >= 0))
        needed = self._blocks_needed(max_tokens)
        self._check_free(needed - held)
        self._take(slot, held, needed)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Counts tokens that a step has appended; the device counts them by itself.

        Raises:
          ValueError: the slot is free, or its blocks do not hold that many tokens.
        """
        self._check_held(slot)
        length = int(self.length_tokens[slot]) + num_tokens
        capacity = int(np.sum(self.block_table[slot] >= 0)) * self._config.block_tokens
        if not 0 <= num_tokens <= length <= capacity:
            raise ValueError(
                f"num_tokens must leave slot {slot} within its {capacity} reserved tokens, got "
                f"{num_tokens} for a length of {length - num_tokens}; extend it first"
            )
        self.length_tokens[slot] = length

    def release(self, slot: int) -> None:
        """Takes a request's slot and blocks back.

        Raises:
          ValueError: the slot is free already.
        """
        self._check_held(slot)
        blocks = self.block_table[slot]
        self._free_blocks.extend(int(block) for block in blocks[blocks >= 0][::-1])
        self.block_table[slot] = -1
        self.length_tokens[slot] = 0
        self._free_slots.append(slot)
        self._changed.add(slot)

    def apply(self, cache: ModelCache) -> ModelCache:
        """Brings the device's lengths and tables up to date; no wait, one shape for any change."""
        if not self._changed:
            return cache
        slots = np.full(len(self.length_tokens), -1, np.int32)
        slots[: len(self._changed)] = sorted(self._changed)
        self._changed.clear()
        rows = np.maximum(slots, 0)
        values = (slots, self.length_tokens[rows], self.block_table[rows])
        return update_slots(cache, *map(jnp.asarray, values))

    @staticmethod
    def acquire(cache: ModelCache, step_input: StepInput, *, layer_idx: int) -> LayerCacheHandle:
        """The handle of one layer in one call; pure, for use inside a traced step.

        Raises:
          ValueError: there is no such layer.
        """
        if not 0 <= layer_idx < len(cache.schemas):
            raise ValueError(f"layer_idx must be 0..{len(cache.schemas) - 1}, got {layer_idx}")
        schema = cache.schemas[layer_idx]
        return cache.layer(schema.attn_type, schema.family_idx, cache.index(step_input))

    def _blocks_needed(self, max_tokens: int) -> int:
        if not 1 <= max_tokens <= self._max_context_tokens:
            raise ValueError(
                f"max_tokens must be 1..{self._max_context_tokens} (max_context_tokens), "
                f"got {max_tokens}; shorten the request or build a larger cache"
            )
        return blocks_of(self._config, max_tokens)

    def _check_free(self, needed: int) -> None:
        if needed > self.num_free_blocks:
            raise RuntimeError(
                f"{needed} blocks of {self._config.block_tokens} tokens are needed and "
                f"{self.num_free_blocks} of {self.num_blocks} are free; release a request first"
            )

    def _check_held(self, slot: int) -> None:
        if not 0 <= slot < len(self.length_tokens) or slot in self._free_slots:
            raise ValueError(f"slot must be one that admit gave and release did not end: {slot}")

    def _take(self, slot: int, held: int, needed: int) -> None:
        for logical in range(held, needed):
            self.block_table[slot, logical] = self._free_blocks.pop()
        self._changed.add(slot)
