"""Steps that run the upper layers for the last tokens of a prompt alone leave the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.snapshots import SnapshotPlan, init_snapshot_store
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.upper_layers import upper_layers
from dsv4_jax.step.sampling import SamplingParams, stack_sampling
from dsv4_jax.step.serve_step import serve_step
from dsv4_jax.step.serve_values import ServeInput
from helpers.v41_cache import SLOTS, call_of, fresh, model

pytestmark = pytest.mark.unoptimised

SIZE, UPPER, DRAFTS = 64, 32, 3
STEP = jax.jit(serve_step, static_argnames=("config", "draft_tokens"))


@functools.cache
def ids(length=118, seed=3):
    config, _ = model()
    return np.random.default_rng(seed).integers(3, config.vocab_size, length)


def step(state, rows, whole, *, follows):
    """One step of (slot, tokens) rows, of which all layers run those in `whole`; None is all."""
    config, params = model()
    places, start = [], 0
    for number, (_, tokens) in enumerate(rows):
        if whole is not None and number in whole:
            places += range(start, start + len(tokens))
        start += len(tokens)
    upper = None
    if whole is not None:
        upper = jnp.asarray(np.pad(places, (0, UPPER - len(places)), constant_values=-1), jnp.int32)
    given = ServeInput(
        step_input=call_of(rows, SIZE),
        num_checked=jnp.ones(SLOTS, jnp.int32),
        next_token_ids=jnp.asarray(follows, jnp.int32),
        sampling=stack_sampling([SamplingParams()] * SLOTS, with_stops=False),
        snapshots=SnapshotPlan(**{name: jnp.full(1, -1) for name in ("rows", "ends", "places")}),
        upper=upper,
    )
    return STEP(params, *state, given, config=config, draft_tokens=DRAFTS)


def start():
    config, _ = model()
    cache = fresh(config)
    return cache, init_snapshot_store(cache, 1)


def read(tokens, skipped, *, slot=1):
    """What a prompt leaves whose first tokens skip the upper layers: cache and last output."""
    state, known = start(), 0
    ends = sorted({*range(30, len(tokens), 30), skipped, len(tokens)} - {0})
    for end in ends:
        follows = tokens[end] if end < len(tokens) else -1
        whole = {0} if end > skipped else set()
        part = [(slot, tokens[known:end])]
        *state, output = step(state, part, whole, follows=[follows, -1, -1])
        known = end
    return state[0], output


def leaves_of(cache, slot=1):
    """Rings and what waits of a slot, and all blocks."""
    found = {f"{name}.{path}": np.asarray(leaf)[:, slot]
             for name, pool in cache.state.items()
             for path, leaf in jax.tree_util.tree_leaves_with_path(pool)}  # fmt: skip
    for name, pool in cache.paged.items():
        blocks = np.asarray(cache.block_table)[slot]
        for path, leaf in jax.tree_util.tree_leaves_with_path(pool):
            found[f"{name}.{path}"] = np.asarray(leaf)[:, blocks[blocks >= 0]]
    return found


def differing(one, other):
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def test_how_far_the_upper_layers_reach_back():
    assert upper_layers(DSV4Config.v41_flash()).first == 20
    assert upper_layers(DSV4Config.v41_flash()).look_back == 20 * 127 + 1 == 2_541
    assert upper_layers(model()[0]).look_back == 3 * 7 + 1
    assert upper_layers(DSV4Config.flash()) is None


@pytest.mark.slow
def test_a_prompt_leaves_the_bits_that_all_layers_of_all_tokens_leave():
    """Every ring, the draft's too, entries, keys, what is drawn and what is guessed after it."""
    tokens, look_back = ids(), upper_layers(model()[0]).look_back
    cache, output = read(tokens, 0)
    for skipped in (len(tokens) - look_back, 30, 61):
        found, drawn = read(tokens, skipped)
        assert not differing(leaves_of(cache), leaves_of(found))
        np.testing.assert_array_equal(drawn.token_ids[0], output.token_ids[0])
        np.testing.assert_array_equal(drawn.draft_token_ids[0], output.draft_token_ids[0])
        np.testing.assert_array_equal(drawn.confidence[0], output.confidence[0])


@pytest.mark.slow
def test_one_token_less_is_not_enough():
    """The oldest row of the last layer's ring is another then, and that alone."""
    tokens, look_back = ids(), upper_layers(model()[0]).look_back
    cache, _ = read(tokens, 0)
    found, _ = read(tokens, len(tokens) - look_back + 1)
    names = differing(leaves_of(cache), leaves_of(found))
    assert names
    for name in names:
        one, other = leaves_of(cache)[name], leaves_of(found)[name]
        layers, rows = np.nonzero((one != other).reshape(*one.shape[:2], -1).any(-1))
        assert name.startswith(("csa.", "swa."))  # the last layer's, and stages that read its input
        assert set(rows) == {(len(tokens) - 8) % 8}
        assert set(layers) <= ({5} if name.startswith("csa.") else {2, 3})


@pytest.mark.slow
def test_rows_that_are_read_beside_each_other_do_not_disturb_each_other():
    """One skips, one is read by all layers, and one decodes."""
    tokens, other = ids(), ids(20, 4)
    alone = start()
    *alone, _ = step(alone, [(0, other[:19])], {0}, follows=[other[19], -1, -1])
    *alone, wanted = step(alone, [(0, other[19:])], {0}, follows=[-1] * 3)
    cache, _ = read(tokens, 60)
    state = start()
    *state, _ = step(
        state, [(1, tokens[:30]), (0, other[:19])], {1}, follows=[tokens[30], other[19], -1]
    )
    *state, drawn = step(
        state, [(0, other[19:]), (1, tokens[30:60])], {0}, follows=[-1, tokens[60], -1]
    )
    np.testing.assert_array_equal(drawn.columns[0], wanted.columns[0])
    for begin in (60, 90):
        follows = [tokens[begin + 30] if begin == 60 else -1, -1, -1]
        *state, _ = step(state, [(1, tokens[begin : begin + 30])], {0}, follows=follows)
    assert not differing(leaves_of(cache), leaves_of(state[0]))
    assert not differing(leaves_of(alone[0], 0), leaves_of(state[0], 0))


def test_a_model_whose_layers_make_their_own_entries_needs_all():
    config = DSV4Config.tiny()
    params = ds.init_params(config, jax.random.key(0))
    cache = ds.init_cache(config, max_requests=SLOTS, max_context_tokens=128)
    store = init_snapshot_store(cache, 1)
    given = ServeInput(
        step_input=call_of([(0, np.arange(4))], SIZE),
        num_checked=jnp.ones(SLOTS, jnp.int32),
        next_token_ids=jnp.full(SLOTS, -1),
        sampling=stack_sampling([SamplingParams()] * SLOTS, with_stops=False),
        snapshots=SnapshotPlan(**{name: jnp.full(1, -1) for name in ("rows", "ends", "places")}),
        upper=jnp.arange(8, dtype=jnp.int32),
    )
    with pytest.raises(ValueError, match="upper must be None of a model"):
        serve_step(params, cache, store, given, config=config, draft_tokens=0)
