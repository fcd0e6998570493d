"""The manager's life on a toy device: hits, forks, evictions; nothing lost, nothing read unwritten.

Freed storage is poisoned, so that a read of it fails; a token's value is the hash of its history,
so that a block of another history fails too.
"""

import os
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4_jax.allocator import prefix_tree
from dsv4_jax.allocator.pending_changes import PendingChanges
from dsv4_jax.allocator.prefix_tree import PrefixTree
from helpers.manager_machine import NUM_BLOCKS, NUM_SLOTS, SIZE, Shards, World

EVENTS = int(os.environ.get("DSV4_SOAK_EVENTS", "1000000"))


class ManagerLife(RuleBasedStateMachine):
    """Ten operations in any order. Known bugs B4, B13, B32."""

    def __init__(self):
        super().__init__()
        self.world = World()

    def slot(self, data):
        return data.draw(st.sampled_from(sorted(self.world.tenants)))

    @rule(
        stem=st.integers(0, 2), length=st.integers(1, 5 * SIZE), extra=st.integers(0, SIZE),
        salt=st.sampled_from([b"", b"x"]),
    )  # fmt: skip
    def admit(self, stem, length, extra, salt):
        self.world.admit(stem, length, extra, salt)

    @precondition(lambda self: self.world.tenants)
    @rule(data=st.data(), tokens=st.integers(0, 3 * SIZE), keep=st.booleans())
    def prefill(self, data, tokens, keep):
        self.world.step(self.slot(data), tokens, 0, keep)

    @precondition(lambda self: self.world.tenants)
    @rule(data=st.data(), tokens=st.integers(1, 9), rejected=st.integers(0, 9))
    def speculate(self, data, tokens, rejected):
        self.world.step(self.slot(data), tokens, rejected, True)

    @precondition(lambda self: self.world.tenants)
    @rule(data=st.data(), tokens=st.integers(0, 2 * SIZE))
    def extend(self, data, tokens):
        self.world.extend(self.slot(data), tokens)

    @precondition(lambda self: self.world.tenants)
    @rule(data=st.data(), extra=st.integers(0, SIZE))
    def fork(self, data, extra):
        self.world.fork(self.slot(data), extra)

    @precondition(lambda self: self.world.tenants)
    @rule(data=st.data(), extra=st.integers(0, SIZE))
    def fork_twice(self, data, extra):
        """A fork of a fork that the device has not been told of."""
        before = set(self.world.tenants)
        self.world.fork(self.slot(data), extra)
        for new in set(self.world.tenants) - before:
            self.world.fork(new, extra)

    @precondition(lambda self: self.world.tenants)
    @rule(data=st.data())
    def release(self, data):
        self.world.release(self.slot(data))

    @precondition(lambda self: self.world.tenants)
    @rule(data=st.data())
    def preempt(self, data):
        """Release, and admit the same tokens again."""
        slot = self.slot(data)
        tenant = self.world.tenants[slot]
        self.world.release(slot)
        stems, length = self.world.stems, len(tenant.tokens)
        same = [i for i in range(3) if tenant.tokens == stems[i, :length].tolist()]
        stem = same[0] if same else 0
        self.world.admit(stem, max(len(tenant.tokens), 1), 9, tenant.salt)

    @rule(num_blocks=st.integers(0, 5))
    def evict(self, num_blocks):
        self.world.evict(num_blocks)

    @rule()
    def apply(self):
        self.world.apply()

    @precondition(lambda self: len(self.world.tenants) < NUM_SLOTS)
    @rule(data=st.data())
    def refuse(self, data):
        free = sorted(set(range(-1, NUM_SLOTS + 1)) - self.world.tenants.keys())
        self.world.refuse(data.draw(st.sampled_from(free)))

    @invariant()
    def conserved(self):
        self.world.check()


TestManagerLife = ManagerLife.TestCase
TestManagerLife.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestManyManagerLives(ManagerLife.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def soak(events, seed, block_parts=1):
    """Random events without hypothesis; what happened how often."""
    world, rng = World(seed, block_parts), np.random.default_rng(seed)
    for number in range(events):
        world.random_event(rng)
        if number % 16 == 0:
            world.check()
    while world.tenants:
        world.release(next(iter(world.tenants)))
    world.evict(NUM_BLOCKS)
    assert world.manager.num_free_blocks == world.num_blocks
    assert world.manager.num_cached_blocks == 0
    assert world.manager.prefixes.tree.num_held_snapshots == 0
    world.check()
    return world.counts | {"evicted": world.manager.num_evicted}


@pytest.mark.parametrize(
    ("block_parts", "events"),
    [(1, 4000), (2, 2000), *(pytest.param(n, 20000, marks=pytest.mark.slow) for n in (3, 6))],
)
def test_thousands_of_random_events(block_parts, events):
    """A fixed run, so that what it covers is known: every operation, hits and refusals.

    With several parts blocks are dealt over as many devices, each with free ones of its own.
    """
    counts = soak(events, 0, block_parts)
    for name in ("admit", "hit", "step", "snapshot", "extend", "fork", "release", "evict", "apply",
                 "refuse", "refused"):  # fmt: skip
        assert counts[name] > 20, (name, counts)


@pytest.mark.parametrize(
    ("count", "events"), [(2, 2000), pytest.param(3, 100000, marks=pytest.mark.slow)]
)
def test_random_events_on_several_data_shards(count, events):
    shards, rng = Shards(count), np.random.default_rng(0)
    for number in range(events):
        shards.random_event(rng)
        if number % 16 == 0:
            shards.check()
    shards.check()
    for world in shards.worlds:
        for name in ("admit", "hit", "step", "snapshot", "fork", "release", "evict", "refuse"):
            assert world.counts[name] > 5, (name, world.counts)


@pytest.mark.slow
def test_a_million_random_events():
    """Known bug B31: what a long life does to blocks that were assumed to be there."""
    started = time.process_time()
    counts = soak(EVENTS, seed=1)
    print(f"{EVENTS} events in {time.process_time() - started:.0f} s of one core: {counts}")


def break_fork_sharing(monkeypatch):
    """The open block is shared instead of copied."""
    monkeypatch.setattr(PendingChanges, "copy", lambda self, source, target, a, b: None)


def break_snapshot_loads(monkeypatch):
    """Known bug B13: a hit without the window."""
    take = PendingChanges.take
    monkeypatch.setattr(
        PendingChanges, "take", lambda self, *args: (self.loads.clear(), take(self, *args))[1]
    )


def break_salts(monkeypatch):
    monkeypatch.setattr("dsv4_jax.allocator.block_contents._root_key", lambda salt: b"0" * 16)


def break_chaining(monkeypatch):
    """A block is known by its own tokens alone, whatever came before."""
    monkeypatch.setattr("dsv4_jax.allocator.block_contents._chain", lambda key, tokens: tokens[:16])
    monkeypatch.setattr(PrefixTree, "match", _match_by_tokens)


def _match_by_tokens(self, tokens, num_blocks):
    chain = []
    for content in tokens.upto(num_blocks)[:num_blocks]:
        node = self._nodes.get(content.tokens[:16])
        if node is None:
            break
        chain.append(node)
    return chain


def break_eviction(monkeypatch):
    """Nodes with users are evicted too."""

    def is_leaf(entry):
        return entry[-1].is_kept and not entry[-1].num_children

    monkeypatch.setattr(prefix_tree, "_is_current", is_leaf)


def break_returned_places(monkeypatch):
    """The place of a boundary that the step took back is lost."""
    monkeypatch.setattr(PrefixTree, "return_snapshot_place", lambda self, place: None)


def break_full_hits(monkeypatch):
    """Of a known prefix, the last block is left out."""
    match = PrefixTree.match
    monkeypatch.setattr(PrefixTree, "match", lambda self, *args: match(self, *args)[:-1])


def break_snapshot_eviction(monkeypatch):
    """A block of history gives way to a snapshot."""
    take = PrefixTree.take_snapshot_place

    def take_and_evict(self):
        if not self._free_snapshots and self.num_unused:
            self.evict()
        return take(self)

    monkeypatch.setattr(PrefixTree, "take_snapshot_place", take_and_evict)


@pytest.mark.parametrize(
    "breaking",
    [
        break_full_hits,
        break_snapshot_eviction,
        break_fork_sharing,
        break_snapshot_loads,
        break_salts,
        break_chaining,
        break_eviction,
        break_returned_places,
    ],
)
def test_the_machine_notices_a_broken_manager(monkeypatch, breaking):
    breaking(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, KeyError)):
        soak(4000, seed=0)
