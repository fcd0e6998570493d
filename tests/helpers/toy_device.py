"""A cache of a few NumPy arrays that stores what it is told, to check the manager against.

A token's value is the hash of its whole history, so that any wrong block, row or order shows. Each
block row, ring row and snapshot holds such values; freed storage holds poison.
"""

import numpy as np

POISON = -1
WINDOW = 5


def extend_hash(value, token):
    return (value * 1_000_003 + int(token) + 7) & 0x7FFFFFFFFFFFFFF


class ToyDevice:
    """Blocks of `size` rows, a ring of `WINDOW` rows per slot, and snapshots of rings."""

    def __init__(self, num_slots, width, num_blocks, num_snapshots, size):
        self.size = size
        self.blocks = np.full((num_blocks, size), POISON, np.int64)
        self.rings = np.full((num_slots, WINDOW), POISON, np.int64)
        self.snapshots = np.full((max(num_snapshots, 1), WINDOW), POISON, np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        self.tables = np.full((num_slots, width), -1, np.int64)

    def apply(self, changes):
        """As `apply_changes` does: gather, poison, scatter, load, set."""
        if changes is None:
            return
        copies = changes.copy_to >= 0
        rings = self.rings[changes.copy_from[copies]]
        opened = changes.block_to >= 0
        blocks = self.blocks[changes.block_from[opened]]
        if changes.freed_slots is not None:
            self.rings[changes.freed_slots] = POISON
            self.blocks[changes.freed_blocks] = POISON
        self.rings[changes.copy_to[copies]] = rings
        self.blocks[changes.block_to[opened]] = blocks
        loads = changes.load_slots >= 0
        self.rings[changes.load_slots[loads]] = self.snapshots[changes.load_places[loads]]
        rows = changes.slots >= 0
        self.lengths[changes.slots[rows]] = changes.length_tokens[rows]
        self.tables[changes.slots[rows]] = changes.block_table[rows]

    def run(self, slot, tokens, num_kept, expected, start, boundaries=()):
        """Reads all that a step of these tokens reads, then appends; the values of kept tokens.

        Args:
          slot: of the request.
          tokens: of the step; all write their block rows, the kept ones the ring too.
          num_kept: how many stay.
          expected: hashes of the slot's history, token by token.
          start: hash of no tokens.
          boundaries: pairs (end, place) to keep, where they are reached.
        """
        self.check(slot, expected)
        length, values = len(expected), []
        value = expected[-1] if expected else start
        for number, token in enumerate(tokens):
            value = extend_hash(value, token)
            position = length + number
            block = self.tables[slot, position // self.size]
            assert block >= 0, "a step without a block"
            self.blocks[block, position % self.size] = value
            if number >= num_kept:
                continue
            values.append(value)
            self.rings[slot, position % WINDOW] = value
            for end, place in boundaries:
                if end == position + 1:
                    self.snapshots[place] = self.rings[slot]
        self.lengths[slot] = length + num_kept
        return values

    def check(self, slot, expected):
        """Every readable row is that of the slot's own history."""
        length = int(self.lengths[slot])
        assert length == len(expected)
        positions = np.arange(length)
        blocks = self.tables[slot][positions // self.size]
        assert np.all(blocks >= 0)
        np.testing.assert_array_equal(self.blocks[blocks, positions % self.size], expected)
        recent = positions[-WINDOW:]
        np.testing.assert_array_equal(
            self.rings[slot, recent % WINDOW], np.asarray(expected)[recent]
        )
