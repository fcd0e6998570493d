"""The cache of a whole model: what it allocates, and how slots are set and emptied."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.model_cache import family_bytes, family_kinds
from dsv4_jax.cache.schema import FamilyKind
from dsv4_jax.cache.snapshots import init_snapshot_store
from dsv4_jax.serving.metrics.metrics import count_compiles
from helpers import slow
from helpers.arrays import on_device
from helpers.schedules import step_input
from pallas_kernels.common.formats import CACHE_FORMATS

pytestmark = pytest.mark.unoptimised

TINY = ds.DSV4Config.tiny()  # 3 window layers with the draft block, 3 CSA, 2 HCA
SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
SIZE = {"max_requests": 4, "max_context_tokens": 300}  # three blocks of 128 tokens
MIB = 2**20


def of_types(*layer_types):
    routers = (ds.RouterType.LEARNED,) * len(layer_types)
    return dataclasses.replace(
        TINY, layer_types=layer_types, router_types=routers, num_mtp_layers=0
    )


@pytest.mark.parametrize("cache_format", slow.all_but(["fp8_ue8m0"], list(CACHE_FORMATS)))
def test_every_family_is_stacked_once(cache_format):
    cache = ds.init_cache(TINY, cache_format=cache_format, **SIZE)
    schemas = {schema.attn_type: schema for schema in cache.schemas}
    assert [schema.attn_type for schema in cache.schemas] == [*TINY.layer_types, SWA]
    expected_state = {
        attn: ds.cache.init_state_pool(schemas[attn], 4, num_layers=count)
        for attn, count in {"swa": 3, "csa": 3, "hca": 2}.items()
    }
    expected_paged = {
        attn: ds.cache.init_paged_pool(schemas[attn], 12, num_layers=count)
        for attn, count in {"csa": 3, "hca": 2}.items()
    }
    for pools, expected in ((cache.state, expected_state), (cache.paged, expected_paged)):
        assert pools.keys() == expected.keys()
        for attn in expected:
            arrays, wanted = jax.tree.leaves(pools[attn]), jax.tree.leaves(expected[attn])
            chex.assert_trees_all_equal_shapes_and_dtypes(arrays, wanted)
            chex.assert_trees_all_equal(arrays, wanted)
    chex.assert_shape([cache.length_tokens, cache.block_table], [(4,), (4, 3)])
    chex.assert_type([cache.length_tokens, cache.block_table], jnp.int32)
    assert not np.any(cache.length_tokens)


@pytest.mark.parametrize(
    "cache_format", slow.all_but(["fp8_ue8m0", "fp8_per_entry"], list(CACHE_FORMATS))
)
def test_shapes_are_those_of_the_cache_and_allocate_nothing(cache_format):
    shapes = ds.cache.cache_shapes(TINY, cache_format=cache_format, **SIZE)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    cache = ds.init_cache(TINY, cache_format=cache_format, **SIZE)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, cache)
    assert jax.tree.structure(shapes) == jax.tree.structure(cache)


@pytest.mark.parametrize("num_blocks", [None, 5])
@pytest.mark.parametrize("cache_format", slow.all_but(["fp8_ue8m0"], list(CACHE_FORMATS)))
def test_arrays_of_the_host_are_those_of_a_program(cache_format, num_blocks):
    """On a CPU NumPy makes an empty cache and its store; in a program it makes none of it."""

    def build():
        cache = ds.init_cache(TINY, cache_format=cache_format, num_blocks=num_blocks, **SIZE)
        return cache, init_snapshot_store(cache, 2)

    before = count_compiles()
    found = build()
    assert count_compiles() == before or jax.default_backend() != "cpu"
    traced = jax.jit(build).trace()
    assert traced.jaxpr.consts == []
    wanted = traced.lower().compile()()
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (ours.aval, ours.sharding) == (theirs.aval, theirs.sharding)
        assert ours.committed == theirs.committed
    for ours, theirs in zip(*map(jax.tree.leaves, (found[0], wanted[0])), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    # The store is NaN in both, but a program of a CPU clears bits of a constant NaN in BF16.
    for ours in jax.tree.leaves(found[1]):
        assert not np.asarray(ours).tobytes().strip(b"\xff")


def test_memory_is_that_of_all_arrays():
    cache = ds.init_cache(TINY, **SIZE)
    pools = [*cache.state.values(), *cache.paged.values()]
    tables = np.asarray(cache.block_table).nbytes + np.asarray(cache.length_tokens).nbytes
    assert cache.memory_bytes() == sum(pool.memory_bytes() for pool in pools) + tables
    assert cache.memory_bytes() == sum(np.asarray(x).nbytes for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("tokens", [1, 128, 129, 300])
def test_every_slot_has_a_full_context_without_a_manager(tokens):
    cache = ds.init_cache(TINY, max_requests=3, max_context_tokens=tokens)
    width = -(-tokens // 128)
    assert cache.max_context_tokens == width * 128 >= tokens
    assert cache.max_requests == 3
    for slot, row in enumerate(np.asarray(cache.block_table)):
        np.testing.assert_array_equal(row, np.arange(slot * width, (slot + 1) * width))
    assert cache.paged["csa"].num_blocks == cache.paged["hca"].num_blocks == 3 * width


def test_num_blocks_leaves_the_tables_to_a_manager():
    cache = ds.init_cache(TINY, num_blocks=5, **SIZE)
    assert cache.paged["csa"].num_blocks == cache.paged["hca"].num_blocks == 5
    np.testing.assert_array_equal(cache.block_table, np.full((4, 3), -1))


@pytest.mark.parametrize(
    ("layer_types", "state", "paged"),
    [
        ((SWA, SWA), {"swa"}, set()),
        ((CSA, SWA), {"swa", "csa"}, {"csa"}),
        ((HCA, HCA), {"hca"}, {"hca"}),
    ],
)
@pytest.mark.parametrize("num_blocks", [None, 2])
def test_a_family_without_layers_is_absent(layer_types, state, paged, num_blocks):
    """Known bug B28: a model without one type had no pool where one was read."""
    config = of_types(*layer_types)
    cache = ds.init_cache(config, num_blocks=num_blocks, **SIZE)
    assert (cache.state.keys(), cache.paged.keys()) == (state, paged)
    assert sum(family_bytes(cache).values()) < cache.memory_bytes()
    call = step_input([[]], [0], [0], num_tokens=2)  # without a table it has no room for a token
    handle = ds.KVCacheManager.acquire(cache, call, layer_idx=0)
    assert cache.with_layer(handle).paged.keys() == paged


@pytest.mark.parametrize(
    ("config", "layers", "growing", "with_window", "state"),
    [
        (ds.DSV4Config.flash(), (2, 21, 20), 3514.3, 3517.3, 1.76),
        (ds.DSV4Config.pro(), (0, 30, 31), 5031.4, 5035.8, 2.53),
    ],
    ids=["flash", "pro"],
)
def test_a_context_of_a_million_tokens_takes_the_published_bytes(
    config, layers, growing, with_window, state
):
    """deepseek_v4.md section 7, HCA states as running softmaxes; nothing is allocated."""
    trunk = dataclasses.replace(config, num_mtp_layers=0)
    size = {"max_requests": 1, "max_context_tokens": MIB}
    cache = ds.cache.cache_shapes(trunk, cache_format="fp8_ue8m0", **size)
    sizes, kinds = family_bytes(cache), family_kinds(cache)
    swa, csa, hca = layers
    expected = {
        "csa entries": csa * MIB // 4 * 584,
        "csa index keys": csa * MIB // 4 * 68,
        "hca entries": hca * MIB // 128 * 584,
        "swa window": swa * 74_752,
        "csa window": csa * 74_752,
        "hca window": hca * 74_752,
        "csa compressor state": csa * 65_536,
        "csa indexer state": csa * 16_384,
        "hca compressor state": hca * 6_144,
    }
    assert {name: count for name, count in sizes.items() if count} == {
        name: count for name, count in expected.items() if count
    }
    of_kind = {
        kind: sum(count for name, count in sizes.items() if kinds[name] is kind)
        for kind in FamilyKind
    }
    paged = sum(expected[name] for name in ("csa entries", "csa index keys", "hca entries"))
    window = (swa + csa + hca) * 74_752
    assert list(of_kind.values()) == [paged, window, sum(expected.values()) - paged - window]
    # 2**20 tokens, so that bytes per token and MiB are one number; published to a tenth.
    assert paged / MIB == pytest.approx(growing, abs=0.0501)
    assert (paged + window) / MIB == pytest.approx(with_window, abs=0.0501)
    assert (sum(expected.values()) - paged - window) / MIB == pytest.approx(state, abs=0.005)
    with_draft = ds.cache.cache_shapes(config, cache_format="fp8_ue8m0", **size)
    assert sum(family_bytes(with_draft).values()) == sum(expected.values()) + 74_752


def used_cache():
    """Lengths, tables and every byte as some earlier requests left them."""
    cache = jax.tree.map(lambda leaf: np.full_like(leaf, 7), ds.init_cache(TINY, **SIZE))
    cache = jax.device_put(cache)
    return dataclasses.replace(cache, block_table=i32(*np.arange(12).reshape(4, 3)))


def i32(*values):
    return on_device(values, jnp.int32)


def test_update_slots_sets_those_slots_and_no_other():
    cache = used_cache()
    table = i32([0, 1, -1], [9, 9, 9], [5, -1, -1], [8, 8, 8])
    new = ds.update_slots(cache, i32(3, -1, 1, -1), i32(40, 9, 0, 8), table)
    np.testing.assert_array_equal(new.length_tokens, [7, 0, 7, 40])
    np.testing.assert_array_equal(new.block_table, [[0, 1, 2], [5, -1, -1], [6, 7, 8], [0, 1, -1]])
    chex.assert_trees_all_equal((new.state, new.paged), (cache.state, cache.paged))
    np.testing.assert_array_equal(cache.length_tokens, [7] * 4)


def test_update_of_no_slot_changes_nothing():
    """-1 must not wrap round to the last slot."""
    cache = used_cache()
    new = ds.update_slots(cache, i32(-1, -1), i32(5, 6), jnp.full((2, 3), 11, jnp.int32))
    chex.assert_trees_all_equal(new, cache)


@pytest.mark.parametrize(
    ("lengths", "table", "message"),
    [
        ((2,), (2, 2), r"block_table must have shape \(2, 3\), got block_table.shape=\(2, 2\)"),
        ((2,), (1, 3), r"block_table must have shape \(2, 3\)"),
        ((3,), (2, 3), "slots and length_tokens must agree"),
    ],
)
def test_update_refuses_other_shapes(lengths, table, message):
    arrays = (i32(0, 1), jnp.zeros(lengths, jnp.int32), jnp.zeros(table, jnp.int32))
    with pytest.raises(ValueError, match=message):
        ds.update_slots(used_cache(), *arrays)


@pytest.mark.parametrize(
    "slots",
    [
        (-1, 2, -1),
        *(pytest.param(slots, marks=pytest.mark.slow) for slots in [(-1,), (1,), (3, 0)]),
    ],
)
def test_reset_slots_empties_those_slots_and_leaves_the_tables(slots):
    fresh, cache = ds.init_cache(TINY, **SIZE), used_cache()
    given = (fresh, cache, jax.jit(ds.reset_slots)(cache, i32(*slots)))
    fresh, cache, new = jax.tree.map(np.asarray, given)
    chex.assert_trees_all_equal((new.paged, new.block_table), (cache.paged, cache.block_table))
    for slot in range(4):
        expected = fresh if slot in slots else cache
        assert new.length_tokens[slot] == expected.length_tokens[slot]
        for got, want in zip(
            jax.tree.leaves(new.state), jax.tree.leaves(expected.state), strict=True
        ):
            np.testing.assert_array_equal(got[:, slot], want[:, slot])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_requests": 0}, "requests must be at least 1, got 0"),
        ({"max_context_tokens": 0}, "max_context_tokens must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"cache_format": "int8"}, "cache_format must be one of .* got 'int8'"),
    ],
)
def test_sizes_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ds.init_cache(TINY, **(SIZE | changes))


def test_a_row_may_be_promised_fewer_tokens_than_the_call_has():
    """`max_row_tokens` bounds loops over a row's tokens: T, unless the caller knows better."""
    cache, call = ds.init_cache(TINY, **SIZE), step_input([[1], [2]], [0, 1], [0, 1], num_tokens=6)
    assert cache.index(call).max_row_tokens == 6
    assert cache.index(call, max_row_tokens=1).max_row_tokens == 1
