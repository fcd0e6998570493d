"""Who holds which slot and blocks: nothing is lost, held twice, or refused after admission."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import dsv4_jax as ds
from dsv4_jax.allocator.block_contents import contents_of
from helpers.schedules import step_input

CONFIG = ds.DSV4Config.tiny()  # blocks of 128 tokens
NUM_SLOTS, CONTEXT, NUM_BLOCKS = 4, 700, 11  # full contexts would take 4 * 6 blocks


def make_manager(**changes):
    sizes = {"max_requests": NUM_SLOTS, "max_context_tokens": CONTEXT, "num_blocks": NUM_BLOCKS}
    return ds.KVCacheManager(CONFIG, **(sizes | changes))


def make_cache(num_blocks=NUM_BLOCKS):
    config = dataclasses.replace(CONFIG, num_mtp_layers=0)
    return ds.init_cache(
        config, max_requests=NUM_SLOTS, max_context_tokens=CONTEXT, num_blocks=num_blocks
    )


def blocks_of(tokens):
    return -(-tokens // 128)


def snapshot(manager):
    """All that can be seen of a manager."""
    free = manager.num_free_blocks, manager.num_free_slots
    return manager.length_tokens.tolist(), manager.block_table.tolist(), free


def test_a_block_is_brought_back_where_one_is_left_for_each_admitted_request():
    """Who runs must not be pushed out for a copy of somebody who waits."""
    manager = make_manager(num_blocks=4)
    prefixes, tokens = manager.prefixes, np.arange(384, dtype=np.int32)
    slots = [manager.admit(9) for _ in range(2)]
    contents = [content for content, _ in contents_of(tokens, b"", 128)]
    chain = []
    assert prefixes.bring_back(chain, contents) == []
    manager.release(slots[0])
    rows = prefixes.bring_back(chain, contents[:1])
    assert (len(rows), rows, manager.num_free_blocks) == (1, [chain[0].block], 2)
    rows = prefixes.bring_back(chain, contents[1:])
    assert (rows, len(chain)) == ([chain[1].block], 2)  # the third would be the last free one
    again = [chain[0]]
    assert prefixes.bring_back(again, contents[1:]) == [-1]
    assert again == chain
    manager.extend(slots[1], 200)
    assert manager.num_free_blocks == 0


class Manager(RuleBasedStateMachine):
    """Random requests come, grow and go beside a model of two dicts.

    Known bug B4: an admission that succeeded never fails later.
    """

    def __init__(self):
        super().__init__()
        self.manager = make_manager()
        self.cache = make_cache()
        self.reserved: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def free_blocks(self):
        return NUM_BLOCKS - sum(blocks_of(tokens) for tokens in self.reserved.values())

    def refused(self, method, *arguments, error=RuntimeError, message):
        before = snapshot(self.manager)
        with pytest.raises(error, match=message):
            method(*arguments)
        assert snapshot(self.manager) == before

    @rule(tokens=st.integers(1, CONTEXT))
    def admit(self, tokens):
        free_slots = NUM_SLOTS - len(self.reserved)
        fits = free_slots > 0 and blocks_of(tokens) <= self.free_blocks()
        assert self.manager.can_admit(tokens) == fits
        if fits:
            slot = self.manager.admit(tokens)
            assert slot not in self.reserved
            self.reserved[slot], self.lengths[slot] = tokens, 0
        else:
            message = "blocks of 128 tokens are needed" if free_slots else "all 4 slots are taken"
            self.refused(self.manager.admit, tokens, message=message)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), tokens=st.integers(1, CONTEXT))
    def extend(self, data, tokens):
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        more = blocks_of(tokens) - blocks_of(self.reserved[slot])
        if more <= self.free_blocks():
            self.manager.extend(slot, tokens)
            self.reserved[slot] = max(self.reserved[slot], tokens)
        else:
            self.refused(self.manager.extend, slot, tokens, message="release a request first")

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def advance(self, data):
        """A step appends tokens, up to all that were reserved; the device counts by itself."""
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        tokens = data.draw(st.integers(0, self.reserved[slot] - self.lengths[slot]))
        self.cache = self.manager.apply(self.cache)
        self.manager.advance(slot, tokens)
        lengths = np.array(self.cache.length_tokens)
        lengths[slot] += tokens
        self.cache = dataclasses.replace(self.cache, length_tokens=jnp.asarray(lengths))
        self.lengths[slot] += tokens

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), beyond=st.integers(1, 200))
    def advance_too_far(self, data, beyond):
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        room = blocks_of(self.reserved[slot]) * 128 - self.lengths[slot]
        message = "extend it first"
        self.refused(self.manager.advance, slot, room + beyond, error=ValueError, message=message)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        self.manager.release(slot)
        del self.reserved[slot], self.lengths[slot]

    @precondition(lambda self: len(self.reserved) < NUM_SLOTS)
    @rule(data=st.data())
    def touch_a_free_slot(self, data):
        free = sorted(set(range(-1, NUM_SLOTS + 1)) - self.reserved.keys())
        slot = data.draw(st.sampled_from(free))
        for method, *arguments in (
            (self.manager.release,),
            (self.manager.extend, 1),
            (self.manager.advance, 0),
        ):
            message = f"slot must be one that admit gave .* got {slot}"
            self.refused(method, slot, *arguments, error=ValueError, message=message)

    @rule()
    def apply(self):
        """The device has the manager's copy, and asking again has nothing to do."""
        self.cache = self.manager.apply(self.cache)
        np.testing.assert_array_equal(self.cache.length_tokens, self.manager.length_tokens)
        np.testing.assert_array_equal(self.cache.block_table, self.manager.block_table)
        assert self.manager.apply(self.cache) is self.cache

    @invariant()
    def every_block_has_one_owner_or_none(self):
        table = self.manager.block_table
        held = table[table >= 0].tolist()
        assert len(held) == len(set(held)) == NUM_BLOCKS - self.free_blocks()
        assert set(held) <= set(range(NUM_BLOCKS))
        assert self.manager.num_free_blocks == self.free_blocks()
        assert self.manager.num_free_slots == NUM_SLOTS - len(self.reserved)

    @invariant()
    def every_request_has_its_blocks_in_front(self):
        for slot in range(NUM_SLOTS):
            row = self.manager.block_table[slot]
            count = blocks_of(self.reserved.get(slot, 0))
            assert np.all(row[:count] >= 0)
            assert np.all(row[count:] == -1)
            assert self.manager.length_tokens[slot] == self.lengths.get(slot, 0)


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_full_cache_serves_every_admitted_request_to_its_end():
    """Known bug B4: fill it, run all to the end, take all back."""
    manager = make_manager()
    asked = [700, 300, 129]  # 6 + 3 + 2 blocks
    slots = [manager.admit(tokens) for tokens in asked]
    assert manager.num_free_blocks == 0
    assert not manager.can_admit(1)
    for slot, tokens in zip(slots, asked, strict=True):
        for _ in range(tokens):
            manager.advance(slot, 1)
    for slot in slots:
        manager.release(slot)
    assert (manager.num_free_blocks, manager.num_free_slots) == (NUM_BLOCKS, NUM_SLOTS)
    assert np.all(manager.block_table == -1)


def test_enough_blocks_for_all_contexts_unless_said():
    manager = make_manager(num_blocks=None)
    assert manager.num_blocks == manager.num_free_blocks == NUM_SLOTS * 6
    for _ in range(NUM_SLOTS):
        manager.admit(CONTEXT)
    assert manager.num_free_blocks == 0


def test_a_model_without_compressed_layers_is_managed_too():
    """Known bug B28: no family has blocks, but requests still have slots and lengths."""
    config = dataclasses.replace(
        CONFIG, layer_types=(ds.AttentionType.SWA,), router_types=(ds.RouterType.LEARNED,)
    )
    manager = ds.KVCacheManager(config, max_requests=2, max_context_tokens=300)
    slots = [manager.admit(300), manager.admit(300)]
    assert sorted(slots) == [0, 1]
    manager.advance(slots[0], 300)


@pytest.mark.parametrize("tokens", [0, -1, CONTEXT + 1])
def test_a_request_that_no_context_holds_is_refused_at_once(tokens):
    manager = make_manager()
    slot = manager.admit(100)
    before, message = snapshot(manager), rf"max_tokens must be 1\.\.700 .* got {tokens}"
    with pytest.raises(ValueError, match=message):
        manager.admit(tokens)
    with pytest.raises(ValueError, match=message):
        manager.extend(slot, tokens)
    assert snapshot(manager) == before


def test_can_admit_says_the_same_of_such_a_request_when_all_slots_are_taken():
    def answer(manager):
        try:
            return manager.can_admit(CONTEXT + 1)
        except ValueError as error:
            return str(error)

    full = make_manager(max_requests=1)
    full.admit(1)
    assert answer(full) == answer(make_manager(max_requests=1))


def test_negative_steps_are_refused():
    manager = make_manager()
    slot = manager.admit(300)
    manager.advance(slot, 10)
    with pytest.raises(ValueError, match=f"num_tokens must leave slot {slot} within its 384"):
        manager.advance(slot, -1)
    assert manager.length_tokens[slot] == 10


def test_a_negative_eviction_is_refused():
    manager = make_manager()
    with pytest.raises(ValueError, match="num_blocks must be 0 or more, got -1"):
        manager.evict(-1)
    assert manager.num_evicted == 0


def known_prompt(manager, length, must_follow=0):
    """A prompt whose every full block has a snapshot, and nobody uses it."""
    tokens = np.arange(length, dtype=np.int32) % 90
    slot = manager.admit(length)
    manager.take_changes()
    places = [manager.prefixes.begin_snapshot() for _ in range(length // 128)]
    manager.advance(slot, length)
    manager.share(slot, tokens)
    for number, place in enumerate(places):
        assert manager.prefixes.keep_snapshot(slot, 128 * (number + 1), place, must_follow)
    manager.release(slot)
    manager.take_changes()
    return tokens


def test_a_hit_leaves_as_many_tokens_before_its_last_boundary_as_its_snapshot_asks_for():
    manager = make_manager(num_snapshots=4)
    tokens = known_prompt(manager, 512, 100)
    for length, hit in ((256, 0), (257, 128), (384, 128), (385, 256), (512, 256)):
        slot = manager.admit(length, tokens[:length])
        assert manager.length_tokens[slot] == hit
        assert manager.prefixes.is_exact_hit(slot) == (hit == 0)
        assert not manager.prefixes.is_resumable(slot, tokens[:128])
        assert manager.prefixes.is_resumable(slot, tokens[:128], 100)
        manager.release(slot)
        manager.take_changes()


def test_a_hit_takes_no_more_than_was_asked_for():
    """Admitted for its first chunk alone, a request gets the blocks of that chunk, not more."""
    manager = make_manager(num_snapshots=4)
    tokens = known_prompt(manager, 600)
    for asked, hit, blocks in ((1, 0, 1), (128, 128, 1), (200, 128, 2), (600, 512, 5)):
        slot = manager.admit(asked, tokens)
        assert manager.length_tokens[slot] == manager.prefixes.hit_tokens(slot) == hit
        assert np.count_nonzero(manager.block_table[slot] >= 0) == blocks
        manager.release(slot)


def test_tokens_computed_twice_are_held_once():
    """Known blocks without a snapshot: who computes them again replaces the copy nobody reads."""
    manager, tokens = make_manager(num_snapshots=1), np.arange(256, dtype=np.int32)
    for _ in range(3):
        slot = manager.admit(256, tokens)
        assert manager.prefixes.hit_tokens(slot) == 0
        manager.advance(slot, 256)
        manager.share(slot, tokens)
        assert (manager.num_free_blocks, manager.num_cached_blocks) == (NUM_BLOCKS - 2, 0)
        manager.release(slot)
        assert (manager.num_free_blocks, manager.num_cached_blocks) == (NUM_BLOCKS, 2)


def test_blocks_of_a_fork_that_were_not_shared_before_are_never_evicted():
    """The tree would count them as its own, and give them away under the other's feet."""
    manager, tokens = make_manager(num_snapshots=1), np.arange(256, dtype=np.int32)
    slot = manager.admit(256)
    manager.advance(slot, 256)
    fork = manager.fork(slot, 256)
    manager.share(slot, tokens)
    manager.release(slot)
    assert (manager.num_free_blocks, manager.evict(9)) == (NUM_BLOCKS - 2, 0)
    assert np.all(manager.block_table[fork, :2] >= 0)


def test_no_place_is_taken_while_a_hit_may_still_read_it():
    manager = make_manager(num_snapshots=4)
    tokens = known_prompt(manager, 300)
    manager.admit(300, tokens)
    before = manager.prefixes.tree.num_held_snapshots
    with pytest.raises(RuntimeError, match="apply the hits first"):
        manager.prefixes.begin_snapshot()
    assert manager.prefixes.tree.num_held_snapshots == before
    manager.take_changes()
    assert manager.prefixes.begin_snapshot() >= 0


def test_nothing_reaches_the_device_before_apply():
    manager, cache = make_manager(), make_cache()
    slot = manager.admit(300)
    assert np.all(cache.block_table == -1)
    applied = manager.apply(cache)
    np.testing.assert_array_equal(applied.block_table[slot], [0, 1, 2, -1, -1, -1])
    assert applied.paged is cache.paged
    manager.release(slot)
    np.testing.assert_array_equal(manager.apply(applied).block_table, np.full((4, 6), -1))


def test_a_hit_without_a_place_to_load_from_is_refused():
    """A store that is missing or too small would leave the request's window as it was."""
    manager, cache = make_manager(num_snapshots=4), make_cache()
    slot = manager.admit(300, known_prompt(manager, 300))
    with pytest.raises(ValueError, match="store must be given"):
        manager.apply(cache)
    with pytest.raises(ValueError, match=r"store must have num_snapshots=4 places.* got 3"):
        manager.apply(cache, ds.cache.init_snapshot_store(cache, 3))
    applied = manager.apply(cache, ds.cache.init_snapshot_store(cache, 4))
    assert applied.length_tokens[slot] == 256


def test_acquire_gives_each_layer_its_place_in_its_family():
    cache, call = make_cache(None), step_input([[1, 2]], [0], [2], num_tokens=3)
    families = [int(acquire(cache, call, i).layer) for i in range(CONFIG.num_layers)]
    assert families == [0, 0, 0, 1, 1, 2, 1]
    for layer_idx, attn in enumerate(CONFIG.layer_types):
        handle = acquire(cache, call, layer_idx)
        assert handle.schema.attn_type == attn
        assert handle.state is cache.state[attn]
        assert handle.paged is cache.paged.get(attn)
    traced = jax.jit(acquire, static_argnums=2)(cache, call, 3)
    jax.tree.map(np.testing.assert_array_equal, traced, acquire(cache, call, 3))


def acquire(cache, call, layer_idx):
    return ds.KVCacheManager.acquire(cache, call, layer_idx=layer_idx)


@pytest.mark.parametrize("layer_idx", [-1, 7])
def test_acquire_refuses_a_layer_that_is_not_there(layer_idx):
    call = step_input([[1]], [0], [0], num_tokens=2)
    with pytest.raises(ValueError, match=rf"layer_idx must be 0\.\.6, got {layer_idx}"):
        acquire(make_cache(None), call, layer_idx)
