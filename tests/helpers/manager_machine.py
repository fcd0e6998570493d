"""Random events for the manager on a toy device, beside a model of a few dicts."""

import dataclasses

import jax
import numpy as np

import dsv4_jax as ds
from dsv4_jax.allocator.data_shards import DataShards
from helpers.toy_device import ToyDevice, extend_hash

CONFIG = dataclasses.replace(ds.DSV4Config.tiny(), num_mtp_layers=0)
SIZE = CONFIG.block_tokens
NUM_SLOTS, CONTEXT, NUM_BLOCKS, NUM_SNAPSHOTS = 4, 6 * SIZE, 13, 3


@dataclasses.dataclass
class Tenant:
    """What the model knows of a request: its tokens, their hashes, and what it was given."""

    tokens: list[int]
    values: list[int]
    reserved: int
    salt: bytes
    todo: list[int]


def hashes(tokens, value):
    """Of every prefix of these tokens."""
    values = []
    for token in tokens:
        value = extend_hash(value, token)
        values.append(value)
    return values


class World:
    """The manager, the device, and what should be true of both.

    Every operation may be refused; then nothing must have changed. Token values come from a few
    prompts with common heads, so that hits, duplicates and branches are frequent.
    """

    def __init__(self, seed=0, block_parts=1):
        self.block_parts, self.num_blocks = block_parts, NUM_BLOCKS - NUM_BLOCKS % block_parts
        self.manager = ds.KVCacheManager(
            CONFIG, max_requests=NUM_SLOTS, max_context_tokens=CONTEXT, num_blocks=self.num_blocks,
            num_snapshots=NUM_SNAPSHOTS, poison=True, block_parts=block_parts,
        )  # fmt: skip
        width = CONTEXT // SIZE
        self.device = ToyDevice(NUM_SLOTS, width, self.num_blocks, NUM_SNAPSHOTS, SIZE)
        self.tenants: dict[int, Tenant] = {}
        self.counts: dict[str, int] = {}
        rng = np.random.default_rng(seed)
        stems = rng.integers(0, 50, (3, CONTEXT))
        stems[1, : 2 * SIZE] = stems[0, : 2 * SIZE]
        stems[2, :SIZE] = stems[0, :SIZE]
        self.stems = stems
        self.stem_values = {
            (stem, start): hashes(stems[stem], start) for stem in range(3) for start in range(2)
        }

    def count(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1

    def state(self):
        ledger = self.manager.ledger()
        return [
            np.asarray(getattr(ledger, field.name)).tolist() for field in dataclasses.fields(ledger)
        ]

    def attempt(self, method, *arguments):
        """The result, or None if it was refused; a refusal changes nothing."""
        before = self.state()
        try:
            return method(*arguments)
        except (RuntimeError, ValueError):
            assert self.state() == before
            self.count("refused")
            return None

    def tell_device(self):
        """Brings the device up to date."""
        self.device.apply(self.manager.take_changes())

    def longest_hit(self, values):
        """Up to which boundary before the last token some block and snapshot say this history."""
        nodes = self.manager.prefixes.tree.nodes
        known = {int(self.device.blocks[n.block, -1]) for n in nodes if n.snapshot >= 0}
        ends = range(SIZE, len(values), SIZE)
        return max((end for end in ends if values[end - 1] in known), default=0)

    def begin_snapshot(self):
        """A place for a snapshot never costs a block of history."""
        before = self.manager.num_evicted, len(self.manager.prefixes.tree.nodes)
        place = self.manager.prefixes.begin_snapshot()
        assert before == (self.manager.num_evicted, len(self.manager.prefixes.tree.nodes))
        return place

    def admit(self, stem, length, extra, salt):
        """A request for a prompt of a stem; it hits all that anybody has left of it."""
        prompt = [int(token) for token in self.stems[stem][:length]]
        token_ids = np.asarray(prompt, np.int32)
        # Histories of different salts share no value.
        values = self.stem_values[stem, len(salt)][:length]
        longest = self.longest_hit(values)
        fits = self.attempt(self.manager.can_admit, length + extra, token_ids, salt)
        slot = self.attempt(self.manager.admit, length + extra, token_ids, salt)
        assert (slot is not None) == bool(fits)
        if slot is None:
            return
        assert slot not in self.tenants
        hit = int(self.manager.length_tokens[slot])
        assert hit == self.manager.prefixes.hit_tokens(slot)
        assert hit == longest
        self.count("hit" if hit else "admit")
        self.tenants[slot] = Tenant(prompt[:hit], values[:hit], length + extra, salt, prompt[hit:])

    def step(self, slot, num_tokens, rejected, keep):
        """Appends tokens, of which some are taken back; `keep` shares what is there from now on."""
        tenant = self.tenants[slot]
        room = tenant.reserved - len(tenant.tokens)
        tokens = tenant.todo[:num_tokens] or [len(tenant.tokens) % 50 for _ in range(num_tokens)]
        tokens = tokens[:room]
        kept = max(len(tokens) - rejected, 0)
        self.tell_device()
        start, end = len(tenant.tokens), len(tenant.tokens) + len(tokens)
        boundaries = []
        for boundary in range((start // SIZE + 1) * SIZE, end + 1, SIZE):
            place = self.begin_snapshot() if keep else -1
            if place >= 0:
                boundaries.append((boundary, place))
        tenant.values += self.device.run(
            slot, tokens, kept, tenant.values, len(tenant.salt), boundaries
        )
        tenant.tokens += tokens[:kept]
        tenant.todo = tenant.todo[kept:]
        self.manager.advance(slot, kept)
        if keep:
            self.manager.share(slot, np.asarray(tenant.tokens, np.int32))
        for boundary, place in boundaries:
            if self.manager.prefixes.keep_snapshot(slot, boundary, place):
                self.count("snapshot")
        self.count("step")

    def extend(self, slot, tokens):
        wanted = min(self.tenants[slot].reserved + tokens, CONTEXT)
        self.attempt(self.manager.extend, slot, wanted)
        if np.sum(self.manager.block_table[slot] >= 0) * SIZE >= wanted:
            self.tenants[slot].reserved = wanted
            self.count("extend")

    def fork(self, slot, extra):
        tenant = self.tenants[slot]
        wanted = min(max(len(tenant.tokens), 1) + extra, CONTEXT)
        new = self.attempt(self.manager.fork, slot, wanted)
        if new is not None:
            assert new not in self.tenants
            self.tenants[new] = Tenant(
                list(tenant.tokens), list(tenant.values), wanted, tenant.salt, []
            )
            self.count("fork")

    def release(self, slot):
        self.manager.release(slot)
        del self.tenants[slot]
        self.count("release")

    def evict(self, num_blocks):
        cached = self.manager.num_cached_blocks
        assert self.manager.evict(num_blocks) == min(num_blocks, cached)
        self.count("evict")

    def apply(self):
        self.tell_device()
        assert self.manager.take_changes() is None
        for slot, tenant in self.tenants.items():
            self.device.check(slot, tenant.values)
        self.count("apply")

    def refuse(self, slot):
        """What a free slot, an impossible length and an unknown block must not change."""
        before = self.state()
        for method, *arguments in (
            (self.manager.release, slot),
            (self.manager.extend, slot, 1),
            (self.manager.fork, slot, 1),
            (self.manager.advance, slot, 0),
            (self.manager.share, slot, np.zeros(0, np.int32)),
            (self.manager.admit, CONTEXT + 1),
            (self.manager.admit, 0),
        ):
            try:
                method(*arguments)
            except ValueError:
                continue
            raise AssertionError(f"{method.__name__}{arguments} was not refused")
        assert self.state() == before
        self.count("refuse")

    def check(self):
        """Conservation: every block is free, or held as often as tables and prefixes say."""
        ledger = self.manager.ledger()
        table = ledger.block_table
        held = np.bincount(table[table >= 0], minlength=self.num_blocks)
        cached = np.bincount(ledger.cached_blocks, minlength=self.num_blocks)
        np.testing.assert_array_equal(ledger.owners, held + cached)
        free = np.bincount(ledger.free_blocks, minlength=self.num_blocks)
        np.testing.assert_array_equal(free, ledger.owners == 0)
        assert cached.max(initial=0) <= 1
        # A node that a request stands on is no cache, even where its table has a copy of its own.
        nodes = self.manager.prefixes.tree.nodes
        unused = [node.block for node in nodes if not node.users]
        assert ledger.num_unused == self.manager.num_cached_blocks == len(unused)
        assert not np.any(held[unused])
        assert self.manager.num_free_blocks == np.sum(free) + len(unused)
        for node in nodes:
            assert node.parent is None or node.users <= node.parent.users
        tree = self.manager.prefixes.tree
        places = len(tree._free_snapshots) + tree.num_held_snapshots
        assert places == NUM_SNAPSHOTS
        assert self.manager.num_free_slots == NUM_SLOTS - len(self.tenants)
        parts = self.block_parts
        of_part = [len(part) for part in self.manager._blocks.free_of_part]
        by_part = np.bincount(ledger.free_blocks * parts // self.num_blocks, minlength=parts)
        assert of_part == by_part.tolist()
        logical = np.argwhere(table >= 0)[:, 1]
        np.testing.assert_array_equal(table[table >= 0] * parts // self.num_blocks, logical % parts)
        for slot, tenant in self.tenants.items():
            count = -(-tenant.reserved // SIZE)
            assert np.all(table[slot, :count] >= 0)
            assert ledger.length_tokens[slot] == len(tenant.tokens)
            # Whoever writes next owns that block alone.
            for logical in range(len(tenant.tokens) // SIZE, count):
                assert ledger.owners[table[slot, logical]] == 1

    def random_event(self, rng, admit=None):
        """One operation, as the state machine draws them; `admit` says who takes a request."""
        slots = list(self.tenants)
        kind = rng.integers(0, 16)
        if kind < 3 or not slots:
            (admit or self.admit)(
                int(rng.integers(0, 3)), int(rng.integers(1, 5 * SIZE)), int(rng.integers(0, SIZE)),
                b"x" * int(rng.integers(0, 2)),
            )  # fmt: skip
            return
        slot = slots[rng.integers(0, len(slots))]
        if kind < 9:
            self.step(slot, int(rng.integers(0, 2 * SIZE)), int(rng.integers(0, 4)), kind < 8)
        elif kind == 9:
            self.extend(slot, int(rng.integers(0, 2 * SIZE)))
        elif kind == 10:
            self.fork(slot, int(rng.integers(0, SIZE)))
        elif kind < 13:
            self.release(slot)
        elif kind == 13:
            self.evict(int(rng.integers(0, 4)))
        elif kind == 14:
            self.apply()
        else:
            free = [s for s in range(-1, NUM_SLOTS + 1) if s not in self.tenants]
            self.refuse(free[rng.integers(0, len(free))])


class Shards:
    """A world for each of a few data shards, and what should be true of all of them.

    Devices are told of all shards at once, and a request goes where `DataShards` says.
    """

    def __init__(self, count, seed=0):
        self.worlds = [World(seed) for _ in range(count)]
        self.shards = DataShards([world.manager for world in self.worlds])
        for world in self.worlds:
            world.tell_device = self.tell_devices

    def tell_devices(self):
        changes, _ = self.shards.take_changes()
        for number, world in enumerate(self.worlds):
            part = jax.tree.map(lambda a, i=number: np.split(a, len(self.worlds))[i], changes)
            world.device.apply(part)
        assert self.shards.take_changes() == (None, False)

    def admit(self, stem, length, extra, salt):
        """Where somebody has left most of the prompt, of those where there is room."""
        tokens = np.asarray(self.worlds[0].stems[stem][:length], np.int32)
        spare = [0] * len(self.worlds)
        shard = self.shards.choose(length + extra, tokens, salt, spare_blocks=spare)
        fitting = [
            number
            for number, world in enumerate(self.worlds)
            if world.manager.can_admit(length + extra, tokens, salt)
        ]
        assert (shard is not None) == bool(fitting)
        if shard is None:
            self.worlds[0].count("refused")
            return
        values = self.worlds[0].stem_values[stem, len(salt)][:length]
        hits = [world.longest_hit(values) for world in self.worlds]
        assert hits[shard] == max(hits[number] for number in fitting)
        rivals = [number for number in fitting if hits[number] == hits[shard]]
        rooms = [world.manager.num_free_blocks for world in self.worlds]
        assert rooms[shard] == max(rooms[number] for number in rivals)
        before = set(self.worlds[shard].tenants)
        self.worlds[shard].admit(stem, length, extra, salt)
        (own,) = set(self.worlds[shard].tenants) - before
        slot = shard * NUM_SLOTS + own
        assert self.shards.of(slot) == (self.worlds[shard].manager, own)
        assert self.shards.length_of(slot) == self.shards.length_tokens[slot]

    def check(self):
        for world in self.worlds:
            world.check()

    def random_event(self, rng):
        """One operation, on any shard."""
        world = self.worlds[rng.integers(0, len(self.worlds))]
        if world.tenants and rng.random() < 0.75:
            world.random_event(rng, admit=self.admit)
        else:
            self.admit(
                int(rng.integers(0, 3)), int(rng.integers(1, 5 * SIZE)), int(rng.integers(0, SIZE)),
                b"x" * int(rng.integers(0, 2)),
            )  # fmt: skip
