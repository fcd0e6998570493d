"""Blocks dealt over devices: what one device can show; meshes are in `tools.meshes.split`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import dsv4_jax as ds
from dsv4_jax.cache import block_split
from dsv4_jax.cache.original import acquire
from dsv4_jax.config.idea import Idea
from pallas_kernels import select_top_k

pytestmark = pytest.mark.unoptimised

CONFIG = dataclasses.replace(ds.DSV4Config.tiny(), num_mtp_layers=0)
select = jax.jit(select_top_k, static_argnums=2)
best_of_all = jax.jit(block_split.best_of_all, static_argnums=2)
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0, 2.0], np.float32)


@pytest.mark.parametrize(("parts", "k"), [(2, 5), (3, 9), (8, 12)])
def test_the_best_of_all_are_those_of_one_list(parts, k):
    """Whatever the ties, infinities and NaN, and where few entries are seen."""
    rng = np.random.default_rng(parts)
    tokens, entries, per_block = 200, 96, 4
    scores = rng.choice(SPECIAL, (tokens, entries))
    scores[::2] = rng.integers(-2, 3, scores[::2].shape)
    visible = rng.integers(0, entries + 1, tokens).astype(np.int32)
    expected = select(scores, visible, k)
    values, numbers = [], []
    for part in range(parts):
        mine = np.flatnonzero(np.arange(entries) // per_block % parts == part)
        seen = np.sum(mine[None] < visible[:, None], axis=1).astype(np.int32)
        best = np.asarray(select(scores[:, mine], seen, k))
        place = np.maximum(best, 0)
        values.append(np.take_along_axis(scores[:, mine], place, axis=1))
        numbers.append(np.where(best >= 0, mine[place], -1))
    order = rng.permutation(parts)
    numbers = np.stack(numbers)[order].astype(np.int32)
    found = best_of_all(np.stack(values)[order], numbers, k)
    np.testing.assert_array_equal(jax.jit(block_split.ascending)(found), expected)
    assert np.all(np.sum(found >= 0, axis=1) == np.minimum(visible, k))


def test_on_one_device_every_entry_is_its_own():
    visible = jnp.arange(9, dtype=jnp.int32)
    np.testing.assert_array_equal(block_split.count_own(visible, 4), visible)
    np.testing.assert_array_equal(block_split.own_entries(visible, 4), visible)
    np.testing.assert_array_equal(block_split.logical_entries(visible, 4), visible)
    blocks = jnp.array([[2, -1, 0, 7]], jnp.int32)
    np.testing.assert_array_equal(block_split.own_table(blocks, 7), [[2, -1, 0, -1]])


def test_blocks_are_cut_over_all_devices_and_all_else_over_data():
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    where = ds.cache_shardings(CONFIG, mesh, cache_format="f32", split_cache=True)
    spec = jax.sharding.PartitionSpec
    paged = {leaf.spec for leaf in jax.tree.leaves(where.paged)}
    assert paged == {spec(None, ("data", "model"))}
    assert {leaf.spec for leaf in jax.tree.leaves(where.state)} == {spec(None, "data")}
    assert where.split_cache
    assert where.block_table.spec == spec("data")


def test_one_device_has_all_parts():
    """There the option changes nothing."""
    sizes = {"max_requests": 2, "max_context_tokens": 300, "cache_format": "f32"}
    split = ds.init_cache(CONFIG, **sizes, mesh=ds.make_mesh(), split_cache=True)
    plain = ds.init_cache(CONFIG, **sizes)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, jax.tree.leaves(split), jax.tree.leaves(plain))
    )


def test_what_a_split_cache_cannot_serve_is_refused():
    idea = Idea(selector=lambda selection: selection.scores > 0)
    config = idea.applied_to(CONFIG)
    sizes = {"max_requests": 1, "max_context_tokens": 128}
    with pytest.raises(ValueError, match=r"split_cache .* selector"):
        ds.init_cache(config, **sizes, split_cache=True)
    mesh = AbstractMesh((1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"num_blocks=6 must divide .* data times model"):
        ds.init_cache(CONFIG, **sizes, num_blocks=6, mesh=mesh, split_cache=True)
    with pytest.raises(ValueError, match="num_blocks must be a multiple of block_parts=4"):
        ds.KVCacheManager(CONFIG, **sizes, num_blocks=6, block_parts=4)
    cache = ds.init_cache(CONFIG, **sizes, split_cache=True)
    zero = jnp.zeros(1, jnp.int32)
    call = ds.StepInput(token_ids=zero, request_ids=zero, request_slots=zero)
    with pytest.raises(ValueError, match=r"original interface .* split_cache"):
        acquire(cache, cache.index(call), layer_idx=0)


def test_a_manager_gives_each_block_of_its_device():
    """Two of a device's blocks go to the first and the fifth of a request, and none is left."""
    manager = ds.KVCacheManager(
        CONFIG, max_requests=3, max_context_tokens=1024, num_blocks=8, block_parts=4
    )
    assert (
        manager.plan.memory_bytes
        < ds.KVCacheManager(
            CONFIG, max_requests=3, max_context_tokens=1024, num_blocks=8
        ).plan.memory_bytes
    )
    slot = manager.admit(5 * 128)
    assert (manager.block_table[slot, :5] // 2).tolist() == [0, 1, 2, 3, 0]
    assert not manager.can_admit(1)
    with pytest.raises(RuntimeError, match="1 too few are free on device 0 of the data shard"):
        manager.admit(1)
    manager.extend(slot, 8 * 128)
    assert manager.num_free_blocks == 0
    manager.release(slot)
    assert manager.can_admit(8 * 128)
