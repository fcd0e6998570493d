"""The pieces of a step with DSpark stages, on rings, against those over whole sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.commit import Staged
from dsv4_jax.cache.new_tokens import empty_staged
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.model import dspark_sequence
from dsv4_jax.model.draft_params import dspark_shapes
from dsv4_jax.model.forward import forward_means
from dsv4_jax.model.params import leaf_spread
from dsv4_jax.model.trunk import run_layers
from dsv4_jax.step.draws import draw
from dsv4_jax.step.propose import propose_block, stage_context
from helpers import taught
from helpers.tolerance import INTERMEDIATE
from pallas_kernels.common.formats import get_cache_format

pytestmark = pytest.mark.unoptimised

CONFIG, SPEC = taught.SMALL, taught.SMALL.dspark
WINDOW, F32 = CONFIG.sliding_window, get_cache_format("f32")
LENGTHS = (1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 45)
"""Settled tokens of each slot; slots are in another order than rows, and one row wants no guess."""
SLOTS = (5, 2, -1, 4, 1, 3)
SETTINGS = [
    ds.SamplingParams(temperature=temperature, seed=seed, top_k=top_k, logit_bias=bias)
    for temperature, seed, top_k, bias in (
        (0.0, 0, 0, {}),
        (1.0, 1, 0, {}),
        (1.0, 2, 0, {}),
        (2.0, 3, 9, {}),
        (3.0, 4, 0, {7: 3.0}),
        (0.7, 5, 0, {}),
    )
]


@pytest.fixture(scope="module")
def params():
    """None of the draft's is trivial."""
    rng = np.random.default_rng(0)

    def drawn(path, leaf):
        mean, spread = leaf_spread(jax.tree_util.keystr(path).rsplit(".", 1)[-1], leaf.shape)
        return jnp.asarray(mean + spread * rng.standard_normal(leaf.shape), leaf.dtype)

    draft = jax.tree.map_with_path(drawn, dspark_shapes(CONFIG, SPEC, jnp.float32))
    table = jnp.asarray(rng.standard_normal(draft.markov_w1.shape), jnp.float32)
    made = ds.init_params(CONFIG.without_draft(), jax.random.key(0))
    return dataclasses.replace(made, mtp=dataclasses.replace(draft, markov_w1=table))


@pytest.fixture(scope="module")
def cache():
    return ds.init_cache(
        CONFIG, max_requests=len(LENGTHS), max_context_tokens=128, cache_format="f32"
    )


@functools.partial(jax.jit, static_argnames="config")
def whole_block(params, anchors, positions, entries, *, config):
    guesses = dspark_sequence.guess_block(
        params, anchors, positions, entries, config=config, fmt=F32
    )
    return guesses.hidden, guesses.logits


jit_propose = jax.jit(propose_block, static_argnames="config")


@pytest.mark.slow
def test_blocks_on_rings_are_those_of_whole_sequences(params, cache):
    """Each row draws what the trunk would draw from the same logits at the position it guesses."""
    rng, rows = np.random.default_rng(1), len(SLOTS)
    entries = rng.standard_normal(
        (SPEC.num_stages, rows, max(LENGTHS), CONFIG.head_dim), np.float32
    )
    pool = cache.state["swa"]
    ring = np.full(pool.window["values"].shape, np.nan, np.float32)  # [L, slots, W, C]
    first = draft_layers(CONFIG)[0].family_idx
    for row, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        for position in range(max(0, length - WINDOW), length if slot >= 0 else 0):
            ring[first:, slot, position % WINDOW] = entries[:, row, position]
    # What was never written is not read, and no trunk layer's ring is.
    window = {"values": jnp.asarray(np.nan_to_num(ring, nan=1e4))}
    state = cache.state | {"swa": dataclasses.replace(pool, window=window)}
    anchors = jnp.asarray(rng.integers(0, CONFIG.vocab_size, rows), jnp.int32)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    sampling = ds.make_sampling(rows, SETTINGS)
    drafts = jit_propose(
        params,
        dataclasses.replace(cache, state=state),
        jnp.asarray(SLOTS, jnp.int32),
        lengths,
        anchors,
        sampling,
        None,
        config=CONFIG,
    )
    hidden, logits = whole_block(params, anchors, lengths, entries, config=CONFIG)
    hidden, logits, found = jax.tree.map(np.asarray, (hidden, logits, drafts))
    assert found.token_ids.shape == (rows, SPEC.block_size)
    live = np.array(SLOTS) >= 0
    previous = np.asarray(anchors)
    for row in range(SPEC.block_size):
        hint = np.asarray(params.mtp.markov_w1)[previous]
        expected = logits[:, row] + hint @ np.asarray(params.mtp.markov_w2).T
        assert np.abs(found.logits[:, row] - expected)[live].max() < 10 * INTERMEDIATE
        read = np.concatenate([hidden[:, row], hint], axis=1)
        sure = read @ np.asarray(params.mtp.confidence)
        assert np.abs(found.confidence[:, row] - sure)[live].max() < 10 * INTERMEDIATE
        drawn, _ = draw(
            jnp.asarray(found.logits[:, row : row + 1]),
            sampling,
            lengths[:, None] + row + 1,
            None,
            jnp.zeros((rows, 0), jnp.int32),
            CONFIG.idea.sampler,
            None,
        )
        np.testing.assert_array_equal(found.token_ids[live, row], np.asarray(drawn)[live, 0])
        previous = found.token_ids[:, row]


@functools.partial(jax.jit, static_argnames="config")
def settle(params, cache, step_input, num_kept, *, config):
    """A call of which so many tokens of each row are kept."""
    call = cache.index(step_input)
    cache, new_tokens, _, means = run_layers(
        params,
        cache,
        step_input.token_ids,
        call,
        empty_staged(cache.state, call.positions.shape[0]),
        config,
        targets=SPEC.target_layers,
    )
    new_tokens = stage_context(params, cache, new_tokens, call, means, config)
    return ds.commit(cache, Staged(new_tokens=new_tokens, call=call), num_kept)


@functools.partial(jax.jit, static_argnames="config")
def whole_entries(params, token_ids, *, config):
    _, means = forward_means(
        params, token_ids, SPEC.target_layers, config=config, cache_format="f32"
    )
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    return dspark_sequence.context_entries(params, means, positions, config, F32)


@pytest.mark.slow
def test_rings_of_stages_are_the_entries_of_kept_tokens(params, cache):
    """In two calls, the second of which keeps some of its tokens, or none."""
    rng, counts, kept = np.random.default_rng(2), (7, 20, 1, 12), ((7, 20, 1, 12), (3, 0, 1, 12))
    token_ids = rng.integers(0, CONFIG.vocab_size, (4, 40)).astype(np.int32)
    expected = np.asarray(whole_entries(params, token_ids, config=CONFIG))
    lengths = np.zeros(4, np.int32)
    for of_call in kept:
        pieces = [
            token_ids[i, n : n + count]
            for i, (n, count) in enumerate(zip(lengths, counts, strict=True))
        ]
        step_input = ds.StepInput(
            token_ids=jnp.asarray(np.concatenate(pieces)),
            request_ids=jnp.asarray(np.repeat(np.arange(4), counts), jnp.int32),
            request_slots=jnp.asarray([2, 0, 5, 3], jnp.int32),
        )
        cache = settle(params, cache, step_input, jnp.asarray(of_call, jnp.int32), config=CONFIG)
        lengths = lengths + np.array(of_call, np.int32)
    ring = np.asarray(cache.state["swa"].window["values"])
    for place in draft_layers(CONFIG):
        stage = place.layer_idx - CONFIG.num_layers
        for row, slot in enumerate((2, 0, 5, 3)):
            for position in range(max(0, lengths[row] - WINDOW), lengths[row]):
                found = ring[place.family_idx, slot, position % WINDOW]
                wanted = expected[stage, row, position]
                assert np.abs(found - wanted).max() < INTERMEDIATE, (stage, row, position)
