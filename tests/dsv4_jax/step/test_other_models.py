"""Caches, parameters, stores and staged tokens of another model or cache are refused by name."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.new_tokens import empty_staged
from dsv4_jax.model.params import param_shapes

SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
LEARNED = ds.RouterType.LEARNED
SIZES = {"max_requests": 3, "max_context_tokens": 256, "cache_format": "f32"}


def config_of(*layer_types, **changes):
    routers = (LEARNED,) * len(layer_types)
    fields = {"layer_types": layer_types, "router_types": routers, "num_mtp_layers": 0}
    return dataclasses.replace(ds.DSV4Config.tiny(), **fields | changes)


CONFIG = config_of(CSA, HCA)
OTHERS = {
    "types": config_of(SWA, CSA),
    "more layers": config_of(CSA, HCA, CSA),
    "fewer layers": config_of(CSA),
    "wider": config_of(CSA, HCA, head_dim=64),
}


def i32(*values):
    return np.asarray(values, np.int32)


STEP = ds.StepInput(token_ids=i32(1, 2, 3), request_ids=i32(0, 1, 2), request_slots=i32(0, 1, 2))
STEPS = {
    "decode_step": {},
    "prefill": {},
    "stage_step": {},
    "decode_loop": {"sampling": ds.make_sampling(3), "num_steps": 2},
}


def shapes_of(config):
    return param_shapes(config), ds.cache.cache_shapes(config, **SIZES)


def trace(name, params, cache):
    """The step inside `jit`, where a wrong model went on to an answer or to a KeyError."""
    step = lambda params, cache: getattr(ds, name)(  # noqa: E731
        params, cache, STEP, config=CONFIG, **STEPS[name]
    )
    return jax.eval_shape(step, params, cache)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("other", OTHERS)
def test_a_step_takes_parameters_and_caches_of_its_config_alone(name, other):
    params, cache = shapes_of(CONFIG)
    wrong_params, wrong_cache = shapes_of(OTHERS[other])
    with pytest.raises(ValueError, match="params must be those of config, got others"):
        trace(name, wrong_params, cache)
    with pytest.raises(ValueError, match="cache must be one that init_cache made for config, got"):
        trace(name, params, wrong_cache)
    assert trace(name, params, cache)


def test_a_cache_may_be_without_the_draft_block():
    with_draft = config_of(CSA, HCA, num_mtp_layers=1)
    params, _ = shapes_of(CONFIG)
    _, cache = shapes_of(CONFIG)
    jax.eval_shape(lambda p, c: ds.prefill(p, c, STEP, config=with_draft), params, cache)
    _, larger = shapes_of(with_draft)
    with pytest.raises(ValueError, match="cache must be one that init_cache made for config"):
        trace("prefill", params, larger)


@pytest.mark.parametrize("other", OTHERS)
def test_forward_takes_parameters_of_its_config_alone(other):
    params, _ = shapes_of(OTHERS[other])
    with pytest.raises(ValueError, match="params must be those of config, got others"):
        jax.eval_shape(lambda params: ds.forward(params, i32([1, 2]), config=CONFIG), params)


def test_arrays_that_a_step_was_given_are_refused_by_name():
    params, cache = ds.init_params(CONFIG, jax.random.key(0)), ds.init_cache(CONFIG, **SIZES)
    gone, kept = jax.tree.map(lambda leaf: leaf.copy(), (params, cache)), (params, cache)
    jax.tree.map(lambda leaf: leaf.delete(), gone)
    with pytest.raises(ValueError, match="cache must be of arrays that are still there"):
        ds.prefill(kept[0], gone[1], STEP, config=CONFIG)
    with pytest.raises(ValueError, match="params must be of arrays that are still there"):
        ds.prefill(gone[0], kept[1], STEP, config=CONFIG)
    with pytest.raises(ValueError, match="params must be of arrays that are still there"):
        ds.Engine(CONFIG, gone[0])


@pytest.fixture(scope="module")
def caches():
    made = {name: ds.init_cache(config, **SIZES) for name, config in OTHERS.items()}
    changed = {"cache_format": "fp8_ue8m0"}, {"max_requests": 2}, {"max_context_tokens": 128}
    names = "format", "slots", "context"
    made |= {n: ds.init_cache(CONFIG, **SIZES | c) for n, c in zip(names, changed, strict=True)}
    return made | {"own": ds.init_cache(CONFIG, **SIZES)}


@pytest.mark.parametrize("other", [*OTHERS, "format"])
def test_a_store_and_the_pools_it_is_for(caches, other):
    store, call = ds.cache.init_snapshot_store(caches["own"], 4), caches["own"].index(STEP)
    plan = ds.cache.SnapshotPlan(rows=i32(0), ends=i32(128), places=i32(0))  # type: ignore
    match = "store must be of arrays like those of a store of this cache"
    state = caches[other].state
    with pytest.raises(ValueError, match=match):
        ds.cache.load_snapshots(state, store, i32(0), i32(0), i32(128))
    with pytest.raises(ValueError, match=match):
        ds.cache.save_snapshots(store, state, None, call, plan)
    for wrong in (None, {}, 3, {"csa": 3}):
        with pytest.raises(ValueError, match="state must be"):
            ds.cache.load_snapshots(wrong, store, i32(0), i32(0), i32(128))
        with pytest.raises(ValueError, match="state must be"):
            ds.cache.save_snapshots(store, wrong, None, call, plan)
    own = caches["own"].state
    for rows in (3, {}, empty_staged(state, 3), empty_staged(own, 4)):
        with pytest.raises(ValueError, match="rows must be of arrays like those of a staged step"):
            ds.cache.save_snapshots(store, own, rows, call, plan)


@pytest.mark.parametrize("other", [*OTHERS, "format", "slots", "context"])
def test_staged_tokens_are_committed_to_their_own_cache(caches, other):
    own, wrong = caches["own"], caches[other]
    staged = ds.cache.Staged(new_tokens=empty_staged(own.state, 3), call=own.index(STEP))
    assert ds.commit(own, staged, i32(1, 1, 1)).length_tokens.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="staged"):
        ds.commit(wrong, staged, i32(1, 1, 1))


def test_a_manager_changes_a_cache_of_its_sizes(caches):
    manager = ds.KVCacheManager(CONFIG, max_requests=3, max_context_tokens=256)
    slot = manager.admit(100)
    for wrong in (None, 3, caches["own"].state):
        with pytest.raises(ValueError, match="cache must be a ModelCache, got"):
            manager.apply(wrong)
    fewer = ds.init_cache(CONFIG, **SIZES, num_blocks=3)
    for wrong in (caches["slots"], caches["context"], fewer):
        with pytest.raises(ValueError, match=r"cache must have the slots, .* of the plan, \(3, 2,"):
            manager.apply(wrong)
    with pytest.raises(ValueError, match="store must be a SnapshotStore, got 3"):
        manager.apply(caches["own"], 3)
    manager.advance(slot, 100)
    manager.fork(slot, 100)
    store = ds.cache.init_snapshot_store(caches["format"], manager.plan.num_snapshots)
    with pytest.raises(ValueError, match="store must be of arrays like those"):
        manager.apply(caches["own"], store)
    store = ds.cache.init_snapshot_store(caches["own"], manager.plan.num_snapshots)
    cache = jax.tree.map(lambda leaf: leaf.copy(), caches["own"])
    applied = manager.apply(cache, store)  # what was refused has taken no change
    np.testing.assert_array_equal(applied.length_tokens[:2], [100, 100])
    np.testing.assert_array_equal(applied.block_table[:2], manager.block_table[:2])
