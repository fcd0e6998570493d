"""Which caches, calls, handles and norms the original interface refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache import original

CONFIG = ds.DSV4Config.tiny()  # C = 32, IC = 16, R = 8, M = 4 and 32, blocks of 128 tokens
SWA, CSA, HCA = 0, 1, 4  # layers
SIZES = {"max_requests": 4, "max_context_tokens": 300, "num_blocks": 12, "cache_format": "f32"}
DIM, T = 32, 3

FIELDS = {"token_ids": [1, 2, 3], "request_ids": [0, 1, 2], "request_slots": [0, 1, 2]}


def call_with(**changes):
    fields = {name: np.asarray(values, np.int32) for name, values in FIELDS.items()}
    return ds.StepInput(**(fields | changes))


def make(**changes):
    cache = ds.init_cache(CONFIG, **SIZES | changes)
    table = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    return dataclasses.replace(cache, block_table=table)


def acquire(layer_idx, cache=None, call=None):
    cache, call = cache or make(), call or call_with()
    return ds.KVCacheManager.acquire(cache, call, layer_idx=layer_idx)


def written(handle):
    """An HCA layer's handle with the tokens of its call."""
    zeros = jnp.zeros((T, DIM))
    return handle.write_swa(zeros, ds.cache.Projections(values=zeros, scores=zeros))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 2, 3]}, "token_ids must be an array"),
        ({"token_ids": None}, "token_ids must be an array"),
        ({"token_ids": np.float32([1, 2, 3])}, r"token_ids must be i32 of rank 1, got float32"),
        ({"token_ids": np.int64([1, 2, 3])}, "token_ids must be i32 of rank 1, got int64"),
        ({"token_ids": np.int32([[1, 2, 3]])}, "token_ids must be i32 of rank 1"),
        ({"token_ids": np.int32([1, 2])}, "token_ids and request_ids must agree on T"),
        ({"token_ids": np.int32([1, -2, 3])}, "token_ids must be in .* got -2"),
        ({"request_ids": np.array([True] * 3)}, "request_ids must be i32 of rank 1, got bool"),
        ({"request_ids": np.int32([0, 1, 3])}, r"request_ids must be in -1\.\.2, got 3"),
        ({"request_ids": np.int32([0, 1, 0])}, "keep each row's tokens next to each other"),
        ({"request_slots": np.int32([0, 1, 4])}, r"request_slots must be in -1\.\.3, got 4"),
        ({"request_slots": np.int32([0, 1, 1])}, "request_slots must hold no slot twice"),
        ({"request_slots": (0, 1, 2)}, "request_slots must be an array"),
    ],
)
def test_a_call_that_is_none_gets_no_handle(changes, message):
    """As in every step: lists, floats and slots that are not there were taken."""
    with pytest.raises(ValueError, match=message):
        acquire(SWA, call=call_with(**changes))


def test_what_is_no_call_or_no_cache_gets_no_handle():
    cache, call = make(), call_with()
    for wrong in (None, 3, [1, 2], cache, cache.index(call)):
        with pytest.raises(ValueError, match="step_input must be a StepInput, got"):
            ds.KVCacheManager.acquire(cache, wrong, layer_idx=SWA)
    for wrong in (None, 3, cache.state, call):
        with pytest.raises(ValueError, match="cache must be a ModelCache, got"):
            ds.KVCacheManager.acquire(wrong, call, layer_idx=SWA)
    for wrong in (None, call):
        with pytest.raises(ValueError, match="call must be a CallIndices, got"):
            original.acquire(cache, wrong, layer_idx=SWA)
    longer = ds.init_cache(CONFIG, **SIZES | {"max_context_tokens": 600})
    with pytest.raises(ValueError, match=r"call.block_table must be an array \[n, 3\]"):
        original.acquire(cache, longer.index(call), layer_idx=SWA)
    tokens = np.zeros(385, np.int32)
    long = call_with(token_ids=tokens, request_ids=tokens, request_slots=np.int32([3]))
    with pytest.raises(ValueError, match=r"token_ids must fit .* got 385 tokens for slot 3"):
        acquire(SWA, call=long)


def test_a_cache_that_a_step_was_given_gets_no_handle():
    cache = make()
    jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    with pytest.raises(ValueError, match=r"cache must be of arrays that are still there, got"):
        acquire(SWA, cache)


def test_a_layer_takes_no_handle_of_another_cache():
    cache = make()
    mine = written(acquire(HCA, cache)).commit()
    assert cache.with_layer(mine).state["hca"] is mine.state
    for wrong in (None, 3, cache, cache.state["hca"]):
        with pytest.raises(ValueError, match="handle must be a LayerCacheHandle, got"):
            cache.with_layer(wrong)
    deeper = dataclasses.replace(CONFIG, sliding_window=CONFIG.sliding_window * 2)
    for others in (make(cache_format="bf16"), ds.init_cache(deeper, **SIZES)):
        with pytest.raises(ValueError, match="handle must be a handle of this cache"):
            cache.with_layer(others.layer("hca", 0, mine.call))
    for name, size in (("max_requests", 5), ("num_blocks", 8)):
        others = ds.init_cache(CONFIG, **SIZES | {name: size})
        with pytest.raises(ValueError, match="handle must be of arrays like those of this cache"):
            cache.with_layer(others.layer("hca", 0, mine.call))


def test_caches_of_equal_sizes_are_told_apart():
    """Arrays of another one were taken, and what a handle of the same layers wrote was lost."""
    cache, twin = make(), make()
    first, second, other = (acquire(layer, cache) for layer in (HCA, HCA, CSA))
    with pytest.raises(ValueError, match="got one of another cache"):
        cache.with_layer(acquire(HCA, twin))
    first = written(first).flush_compression(
        jnp.zeros((first.call.closing_tokens(32).shape[0], DIM))
    )
    with pytest.raises(ValueError, match="got one of another cache"):
        twin.with_layer(first.commit())
    cache = cache.with_layer(first.commit())
    with pytest.raises(ValueError, match="before its HCA layers were written; acquire it anew"):
        cache.with_layer(second)
    assert cache.with_layer(other).state["csa"] is other.state
    assert cache.with_layer(acquire(HCA, cache)).state["hca"] is cache.state["hca"]


NORM, INDEX_NORM, TABLE_OF_ROPE = np.ones(DIM, np.float32), np.ones(16, np.float32), np.ones(4)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("norm", None, "norm must be an array, got None"),
        ("norm", NORM[:-1], r"norm must be an array \[32\] of floats, got float32\[31\]"),
        ("norm", NORM[None], r"norm must be an array \[32\] of floats, got float32\[1, 32\]"),
        ("norm", NORM[:1], r"norm must be an array \[32\]"),
        ("norm", NORM.tolist(), "norm must be an array, got"),
        ("norm", NORM.astype(int), r"norm must be an array \[32\] of floats, got int64"),
        ("indexer_norm", NORM, r"indexer_norm must be an array \[16\] of floats, got float32\[32"),
        ("indexer_norm", None, "indexer_norm must be an array, got None"),
        ("frequencies", TABLE_OF_ROPE[:1], r"frequencies must be an array \[4\] of floats"),
        ("frequencies", None, "frequencies must be an array, got None"),
        ("eps", None, "eps must be a number, got None"),
        ("eps", -1e-6, "eps must be at least 0, got -1e-06"),
        ("eps", float("nan"), "eps must be at least 0, got nan"),
        ("eps", True, "eps must be a number, got True"),
    ],
)
def test_norms_and_frequencies_of_other_shapes_write_no_entry(name, wrong, message):
    handle = acquire(CSA)
    given = {"norm": NORM, "indexer_norm": INDEX_NORM, "frequencies": TABLE_OF_ROPE, "eps": 1e-6}
    with pytest.raises(ValueError, match=message):
        ds.maybe_flush_csa(handle, handle.schema, 4, **given | {name: wrong})
    del given["indexer_norm"]
    if name in given:
        handle = acquire(HCA)
        with pytest.raises(ValueError, match=message):
            ds.maybe_flush_hca(handle, handle.schema, 32, **given | {name: wrong})


QUERIES, WEIGHTS = np.zeros((T, 2, 16), np.float32), np.zeros((T, 2), np.float32)
HEADS, SINK = np.zeros((T, 4, DIM), np.float32), np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("queries", "weights", "message"),
    [
        (None, WEIGHTS, "queries must be an array, got a NoneType"),
        (QUERIES.tolist(), WEIGHTS, "queries must be an array, got a list; pass it through"),
        (QUERIES[0], WEIGHTS, "queries must have rank 3"),
        (QUERIES[:2], WEIGHTS, "must agree on T"),
        (QUERIES, None, "weights must be an array, got a NoneType"),
        (QUERIES, WEIGHTS[:2], "must agree on T"),
        (QUERIES, WEIGHTS[:, :1], "queries and weights must agree on IH"),
        (QUERIES, WEIGHTS.astype(np.int32), "weights must be an array of floats, got int32"),
        (QUERIES.astype(np.int8), WEIGHTS, "queries must be an array of floats, got int8"),
    ],
)
def test_what_are_no_index_queries_selects_nothing(queries, weights, message):
    handle = acquire(CSA)
    for method in (handle.select, handle.scores):
        with pytest.raises(ValueError, match=message):
            method(queries, weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, SINK, None), "queries must be an array, got a NoneType"),
        ((HEADS.tolist(), SINK, None), "queries must be an array, got a list"),
        ((HEADS, None, None), "sink must be an array, got a NoneType"),
        ((HEADS, SINK.tolist(), None), "sink must be an array, got a list"),
        ((HEADS, SINK, [[0]] * T), "selected must be an array, got a list"),
        ((HEADS, SINK, np.zeros((T, 1))), "selected must be int32, got float64"),
        ((HEADS, SINK, None, [1.0]), "frequencies must be an array, got a list"),
    ],
)
def test_what_are_no_queries_attend_to_nothing(arguments, message):
    handle = written(acquire(HCA))
    with pytest.raises(ValueError, match=message):
        handle.attend(*arguments)


@pytest.mark.parametrize("wrong", [None, 3, HEADS])
def test_what_are_no_tokens_are_not_appended(wrong):
    with pytest.raises(ValueError, match="tokens must be a LayerTokens, got"):
        acquire(SWA).append(wrong, wrong)
