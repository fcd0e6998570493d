"""PendingChanges: what the device has not been told yet."""

from __future__ import annotations

import dataclasses

import numpy as np

from dsv4_jax.cache.slot_changes import SlotChanges


@dataclasses.dataclass
class PendingChanges:
    """Changes that the device has not been told yet.

    Attributes:
      changed: slots whose length or table row is new.
      loads: by slot, the place and the boundary of the snapshot to load.
      copies: by new slot, the old slot, its open block and the new one's; -1 for no block.
      freed_slots: slots released since the last `take`.
    """

    changed: set[int] = dataclasses.field(default_factory=set)
    loads: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    copies: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    freed_slots: set[int] = dataclasses.field(default_factory=set)

    def copy(self, source: int, target: int, block_from: int, block_to: int) -> None:
        """A fork. What the source itself still waits for, the target gets from the same origin."""
        if source in self.loads:
            self.loads[target] = self.loads[source]
        elif source in self.copies:
            origin, origin_block, _ = self.copies[source]
            self.copies[target] = (origin, origin_block, block_to)
        else:
            self.copies[target] = (source, block_from, block_to)

    def release(self, slot: int) -> None:
        """The slot's request is gone; others may still copy from what the device has there."""
        self.loads.pop(slot, None)
        self.copies.pop(slot, None)
        self.changed.add(slot)
        self.freed_slots.add(slot)

    def take(
        self,
        length_tokens: np.ndarray,
        block_table: np.ndarray,
        freed: set[int] | None,
        num_blocks: int,
    ) -> SlotChanges | None:
        """Everything since the last time; `freed` blocks are poisoned unless it is None."""
        if not self.changed and not freed:
            return None
        num_slots = len(length_tokens)

        def padded(values: list[int]) -> np.ndarray:
            array = np.full(num_slots, -1, np.int32)
            array[: len(values)] = values
            return array

        slots = padded(sorted(self.changed))
        rows = np.maximum(slots, 0)
        copies = [(old, new, *blocks) for new, (old, *blocks) in self.copies.items()]
        loads = [(slot, *load) for slot, load in self.loads.items()]
        copy_from, copy_to, block_from, block_to = (
            padded([copy[i] for copy in copies]) for i in range(4)
        )
        load_slots, load_places, load_ends = (padded([load[i] for load in loads]) for i in range(3))
        freed_slots = freed_blocks = None
        if freed is not None:
            freed_slots = np.isin(np.arange(num_slots), list(self.freed_slots))
            freed_blocks = np.isin(np.arange(num_blocks), list(freed))
        for told in (self.changed, self.loads, self.copies, self.freed_slots):
            told.clear()
        return SlotChanges(
            slots=slots,
            length_tokens=length_tokens[rows],
            block_table=block_table[rows],
            copy_from=copy_from,
            copy_to=copy_to,
            block_from=block_from,
            block_to=block_to,
            load_slots=load_slots,
            load_places=load_places,
            load_ends=load_ends,
            freed_slots=freed_slots,
            freed_blocks=freed_blocks,
        )


def idle_changes(num_slots: int, width: int, *, num_blocks: int | None = None) -> SlotChanges:
    """Changes that change nothing, of a cache's shapes; with `num_blocks` it may be poisoned."""
    none = np.full(num_slots, -1, np.int32)
    return SlotChanges(
        slots=none,
        length_tokens=none,
        block_table=np.full((num_slots, width), -1, np.int32),
        copy_from=none,
        copy_to=none,
        block_from=none,
        block_to=none,
        load_slots=none,
        load_places=none,
        load_ends=none,
        freed_slots=None if num_blocks is None else np.zeros(num_slots, bool),
        freed_blocks=None if num_blocks is None else np.zeros(num_blocks, bool),
    )
