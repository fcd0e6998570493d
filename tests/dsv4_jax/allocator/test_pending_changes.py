"""What the device has not been told yet: forks of requests that are not there themselves."""

import numpy as np

from dsv4_jax.allocator.pending_changes import PendingChanges


def test_a_fork_before_its_parents_snapshot_is_loaded_loads_the_same():
    """A copy would read what the device has there before the load."""
    pending = PendingChanges(loads={0: (5, 128)})
    pending.copy(0, 1, -1, -1)
    assert pending.loads == {0: (5, 128), 1: (5, 128)}
    assert not pending.copies


def test_a_fork_of_a_fork_that_is_not_copied_yet_copies_the_first():
    pending = PendingChanges()
    pending.copy(0, 1, 7, 8)
    pending.copy(1, 2, 8, 9)
    assert pending.copies == {1: (0, 7, 8), 2: (0, 7, 9)}


def test_a_release_forgets_what_the_slot_waited_for():
    pending = PendingChanges(loads={0: (5, 128)})
    pending.copy(0, 1, -1, -1)
    pending.release(1)
    assert (pending.loads, pending.changed, pending.freed_slots) == ({0: (5, 128)}, {1}, {1})


def test_what_is_taken_is_not_told_again():
    """Whoever shares the object, as the cache of prefixes does, sees that too."""
    pending = PendingChanges(loads={0: (5, 128)})
    pending.copy(1, 2, 7, 8)
    pending.release(3)
    shared, lengths, table = pending.loads, np.zeros(4, np.int32), np.zeros((4, 1), np.int32)
    changes = pending.take(lengths, table, {6}, 9)
    assert changes is not None
    assert (changes.load_slots[0], changes.copy_to[0], changes.slots[0]) == (0, 2, 3)
    assert changes.freed_slots.tolist() == [False, False, False, True]
    assert changes.freed_blocks.tolist() == [False] * 6 + [True] + [False] * 2
    assert pending == PendingChanges()
    assert shared is pending.loads
    assert pending.take(lengths, table, None, 9) is None
