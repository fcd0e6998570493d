"""A layer's tokens into the cache: at once where each row has one, else with the commit."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache import handle as handle_module
from dsv4_jax.cache.append import LayerNorms, LayerTokens
from dsv4_jax.cache.commit import advance
from dsv4_jax.model.trunk import keep
from helpers import slow
from helpers.schedules import assert_same_bytes, step_input
from pallas_kernels.common.norm_rope import rotate

pytestmark = pytest.mark.unoptimised

CONFIG = ds.DSV4Config.tiny()  # C = 32, IC = 16, W = 16, M = 4 and 32
LAYERS = {"swa": 0, "csa": 1, "hca": 2}
HEADS, DIM, INDEX_HEADS, INDEX_DIM, T = 4, 32, 8, 16, 4
SLOTS = [2, 0, -1, 3]


def draw(kind, seed):
    """A call's tokens and a layer's norms; every row of the call has one token at most."""
    rng = np.random.default_rng(seed)
    index_shape = (T, INDEX_HEADS, INDEX_DIM)
    width = {"swa": 0, "csa": 2, "hca": 1}[kind]

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def projections(columns):
        if not columns:
            return None
        return ds.cache.Projections(values=normal(T, columns), scores=normal(T, columns))

    tokens = LayerTokens(
        queries=normal(T, HEADS, DIM),
        kv=normal(T, DIM),
        compressor=projections(width * DIM),
        indexer=projections(2 * INDEX_DIM if kind == "csa" else 0),
        index_queries=normal(*index_shape) if kind == "csa" else None,
    )
    norms = LayerNorms(
        kv=np.linspace(0.5, 1.5, DIM, dtype=np.float32),
        compressor=np.linspace(1.5, 0.5, DIM, dtype=np.float32) if width else None,
        indexer=np.linspace(1.0, 2.0, INDEX_DIM, dtype=np.float32) if kind == "csa" else None,
        frequencies=np.asarray([1.0, 0.5, 0.25, 0.125], np.float32),
        eps=1e-6,
    )
    return tokens, norms


@functools.partial(jax.jit, static_argnames="cache_format")
def make(cache_format):
    """Four requests of 0, 5, 14 and 28 tokens."""
    cache = ds.init_cache(CONFIG, max_requests=4, max_context_tokens=128, cache_format=cache_format)
    return ds.update_slots(cache, jnp.arange(4), jnp.asarray([0, 5, 14, 28]), cache.block_table)


@functools.partial(jax.jit, static_argnames=("kind", "in_place"))
def step(cache, call, tokens, norms, *, kind, in_place):
    handle = ds.KVCacheManager.acquire(cache, call, layer_idx=LAYERS[kind])
    handle = dataclasses.replace(handle, in_place=in_place)
    handle, appended = handle.append(tokens, norms)
    queries, index_queries = appended.queries, appended.index_queries
    assert (appended.new_tokens is None) == in_place
    assert (index_queries is None) == (kind != "csa")
    selected = None if kind == "swa" else handle.all_visible()
    attended = handle.attend(queries, jnp.zeros(HEADS), selected)
    cache, _ = keep(cache, None, handle, appended.new_tokens)
    seen = [] if index_queries is None else [index_queries]
    return advance(cache, handle.call), queries, attended, *seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache_format"), list(itertools.product(LAYERS, ["fp8_ue8m0", "f32"]))
)
def test_tokens_in_place_leave_and_see_what_committed_ones_do(kind, cache_format):
    """Rings go round, windows close in some rows and not in others, and a row lies idle."""
    in_place = committed = make(cache_format)
    for seed in range(6):
        rows = [[1], [2], [], [3] if seed % 2 else []]
        call = step_input(rows, range(4), SLOTS, num_tokens=T)
        arguments = (call, *draw(kind, seed))
        in_place, *found = step(in_place, *arguments, kind=kind, in_place=True)
        committed, *expected = step(committed, *arguments, kind=kind, in_place=False)
        live = np.asarray(call.request_ids) >= 0
        for actual, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(actual[live], wanted[live])
        leaves = [jax.tree.leaves(c) for c in (in_place, committed)]
        assert_same_bytes(*(dict(enumerate(map(np.asarray, flat))) for flat in leaves))
    np.testing.assert_array_equal(in_place.length_tokens, [6, 5, 20, 31])


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow.all_but(["csa"], list(LAYERS)))
def test_queries_of_many_tokens_are_normed_where_they_attend(monkeypatch, kind):
    cache, (tokens, norms) = make("fp8_ue8m0"), draw(kind, 0)
    call = step_input([[1], [2], [], [3]], range(4), SLOTS, num_tokens=T)

    def attend(threshold, attends_next):
        monkeypatch.setattr(handle_module, "_MANY_TOKENS", threshold)

        @jax.jit
        def run(cache, call, tokens, norms):
            handle = ds.KVCacheManager.acquire(cache, call, layer_idx=LAYERS[kind])
            handle = dataclasses.replace(handle, in_place=False)
            handle, appended = handle.append(tokens, norms, attends_next=attends_next)
            selected = None if kind == "swa" else handle.all_visible()
            attended = handle.attend(
                appended.queries, jnp.zeros(HEADS), selected, norms.frequencies
            )
            return appended.queries, attended

        return run(cache, call, tokens, norms)

    queries, attended = attend(T, True)
    np.testing.assert_array_equal(queries, tokens.queries)
    for threshold, attends_next in ((T + 1, True), (T, False)):
        normed, expected = attend(threshold, attends_next)
        assert not np.array_equal(normed, queries)
        np.testing.assert_array_equal(attended, expected)


@pytest.mark.slow
def test_index_queries_meet_keys_of_their_format():
    """Rotated by their positions, rounded as keys are, and not taken where they are not given."""
    cache, (tokens, norms) = make("fp8_ue8m0"), draw("csa", 0)
    call = step_input([[1], [2], [], [3]], range(4), SLOTS, num_tokens=T)
    without = dataclasses.replace(tokens, index_queries=None)

    @jax.jit
    def both_ways(cache, call, tokens, without, norms):
        handle = ds.KVCacheManager.acquire(cache, call, layer_idx=LAYERS["csa"])
        rotated = rotate(tokens.index_queries, handle.positions[:, None], norms.frequencies)
        found = []
        for in_place in (False, True):
            layer = dataclasses.replace(handle, in_place=in_place)
            found.append(layer.append(tokens, norms)[1].index_queries)
            assert layer.append(without, norms)[1].index_queries is None
        return handle.schema.format.round_index(rotated), found

    wanted, found = both_ways(cache, call, tokens, without, norms)
    for queries in found:
        np.testing.assert_array_equal(queries, wanted)
