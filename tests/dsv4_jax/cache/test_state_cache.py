"""What a request keeps besides blocks: its arrays in every format, and how a slot is emptied."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers import slow
from helpers.arrays import on_device
from pallas_kernels.common.formats import CACHE_FORMATS

pytestmark = pytest.mark.unoptimised

CONFIG = ds.DSV4Config.tiny()
SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
NUM_SLOTS, NUM_LAYERS = 4, 2


def make(attn, cache_format="fp8_ue8m0", config=CONFIG, num_slots=NUM_SLOTS):
    spec = next(spec for spec in ds.layer_schedule(config) if spec.attn == attn)
    schema = ds.build_schema(config, spec, cache_format)
    return ds.cache.init_state_pool(schema, num_slots, num_layers=NUM_LAYERS)


def used(pool):
    """The pool after somebody else: no row as it was at the start."""
    return jax.tree.map(lambda leaf: on_device(np.full(leaf.shape, 7), leaf.dtype), pool)


reset_slots = jax.jit(ds.StateCachePool.reset_slots)


def f32(*shape, fill=0.0):
    return np.full((NUM_LAYERS, NUM_SLOTS, *shape), fill, np.float32)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("attn", [SWA, CSA, HCA])
def test_window_holds_w_entries_of_the_format(attn, cache_format):
    pool = make(attn, cache_format)
    shapes = pool.schema.format.ring.plane_shapes(32, 8)
    lead = (NUM_LAYERS, NUM_SLOTS, 16)
    expected = {name: np.zeros((*lead, *s.shape), s.dtype) for name, s in shapes.items()}
    chex.assert_trees_all_equal_shapes_and_dtypes(pool.window, expected)
    chex.assert_trees_all_equal(pool.window, expected)
    assert pool.num_slots == NUM_SLOTS


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_compressor_states_are_f32_in_every_format(cache_format):
    """Values start at 0 and scores at minus infinity, so that a missing window weighs nothing."""
    swa, csa, hca = (make(attn, cache_format) for attn in (SWA, CSA, HCA))
    assert (swa.tail, swa.index_tail, swa.running) == (None, None, None)
    # 2 * M rows of the b- and the a-stream, of the compressor and of the indexer's.
    for tail, width in ((csa.tail, 64), (csa.index_tail, 32)):
        expected = {"values": f32(8, width), "scores": f32(8, width, fill=-np.inf)}
        chex.assert_trees_all_equal_shapes_and_dtypes(tail, expected)
        chex.assert_trees_all_equal(tail, expected)
    assert csa.running is None
    empty = f32(3, 32)
    empty[:, :, 0] = -np.inf
    chex.assert_trees_all_equal_shapes_and_dtypes(hca.running, empty)
    chex.assert_trees_all_equal(hca.running, empty)
    assert (hca.tail, hca.index_tail) == (None, None)


@pytest.mark.parametrize("attn", [SWA, CSA, HCA])
def test_memory_is_that_of_the_arrays(attn):
    pool = make(attn)
    assert pool.memory_bytes() == sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(pool))


@pytest.mark.parametrize(
    ("attn", "num_bytes"),
    [(SWA, 74_752), (CSA, 74_752 + 65_536 + 16_384), (HCA, 74_752 + 6_144)],
)
def test_a_slot_of_the_released_model_has_its_published_bytes(attn, num_bytes):
    """Window of 128 * 584 bytes, CSA state and the indexer's, HCA state as a running softmax."""
    pool = make(attn, config=ds.DSV4Config.flash(), num_slots=1)
    assert pool.memory_bytes() == NUM_LAYERS * num_bytes


@pytest.mark.parametrize("slots", slow.all_but(["3 0", "-1 1 -1"], ["2", "3 0", "-1 1 -1", "-1"]))
@pytest.mark.parametrize(
    ("attn", "cache_format"),
    slow.all_but(
        [(SWA, "fp8_ue8m0"), (CSA, "f32"), (HCA, "fp8_per_entry")],
        list(itertools.product([SWA, CSA, HCA], ["f32", "fp8_ue8m0", "fp8_per_entry"])),
    ),
)
def test_reset_empties_those_slots_and_no_other(attn, cache_format, slots):
    slots = [int(slot) for slot in slots.split()]
    fresh = make(attn, cache_format)
    before = used(fresh)
    after = reset_slots(before, on_device(slots, jnp.int32))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    fresh, before, after = jax.tree.map(np.asarray, (fresh, before, after))
    for slot in range(NUM_SLOTS):
        expected = fresh if slot in slots else before
        for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(got[:, slot], want[:, slot])


@pytest.mark.parametrize("slot", [1, NUM_SLOTS - 1, -1])
def test_reset_slot_is_reset_slots_of_one(slot):
    pool = used(make(HCA))
    expected = pool.reset_slots(on_device([slot], jnp.int32))
    chex.assert_trees_all_equal(pool.reset_slot(slot), expected)
    chex.assert_trees_all_equal(jax.jit(ds.StateCachePool.reset_slot)(pool, slot), expected)


def test_a_running_softmax_that_is_reset_forgets_its_window():
    """HCA: back to no tokens, not to zeros, which would be a token of score 0."""
    pool = used(make(HCA)).reset_slot(1)
    largest, total, weighted = np.moveaxis(np.asarray(pool.running)[:, 1], 1, 0)
    assert np.all(largest == -np.inf)
    assert not total.any()
    assert not weighted.any()


def test_the_old_pool_stays_as_it_was():
    pool = used(make(CSA))
    pool.reset_slot(0)
    chex.assert_trees_all_equal(pool, used(pool))
    with pytest.raises(dataclasses.FrozenInstanceError):
        pool.tail = None


@pytest.mark.parametrize(("max_requests", "num_layers"), [(0, 1), (4, 0)])
def test_sizes_below_one_are_refused(max_requests, num_layers):
    name = "num_layers" if max_requests > 0 else "max_requests"
    message = f"{name} must be at least 1, got {min(max_requests, num_layers)}"
    with pytest.raises(ValueError, match=message):
        ds.cache.init_state_pool(make(SWA).schema, max_requests, num_layers=num_layers)
