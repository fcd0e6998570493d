"""The pieces of a step with an MTP block, on rings, against the block over whole sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.attention.full_sequence import attend_full_sequence
from dsv4_jax.attention.projections import project_input, window_entry
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.cache.commit import Staged
from dsv4_jax.cache.new_tokens import empty_staged
from dsv4_jax.config.layer_schedule import draft_layer, draft_layers
from dsv4_jax.model.block import block
from dsv4_jax.model.hyper_connections import Residual
from dsv4_jax.model.mtp import draft_input, draft_logits
from dsv4_jax.model.trunk import TrunkOutput
from dsv4_jax.step.draws import draw
from dsv4_jax.step.propose import propose, read_tokens, stage_context
from helpers.tolerance import INTERMEDIATE
from pallas_kernels.common.backend import Backend
from pallas_kernels.common.formats import get_cache_format

pytestmark = pytest.mark.unoptimised

CONFIG = ds.DSV4Config.tiny()
WINDOW, BLOCK, F32 = CONFIG.sliding_window, CONFIG.block_tokens, get_cache_format("f32")
SLOTS = (2, 0, 5, 3, 4)
COUNTS = ((BLOCK + 2, BLOCK - 2, 7, 20, 1), (5, 4, 4, 1, 3))
"""Tokens of each row in two calls; the first two rows reach the end of a block."""
KEPT = (COUNTS[0], (4, 2, 0, 1, 1))
LENGTHS = tuple(map(sum, zip(*KEPT, strict=True)))
NO_GUESS = 3
"""A row whose prompt goes on."""
DRAFTS = 10
SETTINGS = [
    ds.SamplingParams(temperature=temperature, seed=seed, top_k=top_k, logit_bias=bias)
    for temperature, seed, top_k, bias in (
        (0.0, 0, 0, {}),
        (1.0, 1, 0, {}),
        (2.0, 2, 9, {}),
        (1.0, 3, 0, {}),
        (3.0, 4, 0, {7: 3.0}),
    )
]


@pytest.fixture(scope="module")
def case():
    """Parameters, streams [B, T, S, D] of some trunk, and the tokens i32[B, T + 1] from each on."""
    rng, num_tokens = np.random.default_rng(0), max(map(sum, zip(*COUNTS, strict=True)))
    shape = (len(SLOTS), num_tokens, CONFIG.hc_mult, CONFIG.hidden_size)
    token_ids = rng.integers(0, CONFIG.vocab_size, (len(SLOTS), num_tokens + 1))
    params = ds.init_params(CONFIG, jax.random.key(0))
    attn = params.mtp.block.attn
    loud = dataclasses.replace(attn, wo_b=10 * attn.wo_b)  # guesses follow from what is attended to
    layer = dataclasses.replace(params.mtp.block, attn=loud)
    params = dataclasses.replace(params, mtp=dataclasses.replace(params.mtp, block=layer))
    return params, rng.standard_normal(shape, np.float32), token_ids.astype(np.int32)


@functools.partial(jax.jit, static_argnames=("config", "num_tokens"))
def settle(params, cache, step_input, num_kept, streams, next_ids, *, config, num_tokens):
    """A call of which so many tokens of each row are kept: the cache, and what was read."""
    call = cache.index(step_input)
    ran = TrunkOutput(cache, None, streams, None)
    read = read_tokens(params, ran, next_ids, call, config)
    blank = empty_staged(cache.state, num_tokens)
    new_tokens = stage_context(params, cache, blank, call, read, config)
    kept = ds.commit(cache, Staged(new_tokens=new_tokens, call=call), num_kept)
    return kept, read[jnp.maximum(call.row_offsets + num_kept - 1, 0)]


@pytest.fixture(scope="module")
def settled(case):
    """The cache after two calls, and [B, S, D] of the last tokens that were kept."""
    params, streams, token_ids = case
    cache = ds.init_cache(CONFIG, max_requests=6, max_context_tokens=2 * BLOCK, cache_format="f32")
    starts, last = np.zeros(len(SLOTS), np.int32), None
    for counts, kept in zip(COUNTS, KEPT, strict=True):
        places = [(row, starts[row] + n) for row, count in enumerate(counts) for n in range(count)]
        row, place = map(np.array, zip(*places, strict=True))
        cache, read = settle(
            params,
            cache,
            ds.StepInput(
                token_ids=jnp.asarray(token_ids[row, place]),
                request_ids=jnp.asarray(row, jnp.int32),
                request_slots=jnp.asarray(SLOTS, jnp.int32),
            ),
            jnp.asarray(kept, jnp.int32),
            streams[row, place],
            token_ids[row, place + 1],
            config=CONFIG,
            num_tokens=len(places),
        )
        wanted = np.array(kept) > 0
        last = read if last is None else jnp.where(wanted[:, None, None], read, last)
        starts += np.array(kept, np.int32)
    return cache, last


jit_draw = jax.jit(draw, static_argnames="sampler")


@functools.partial(jax.jit, static_argnames="config")
def run_whole(params, streams, next_ids, *, config):
    """The block over sequences: its entries [B, T, C], and the streams that it gives.

    The last token of a block has no embedding of its next one, as on a cache.
    """
    positions = jnp.broadcast_to(jnp.arange(next_ids.shape[1], dtype=jnp.int32), next_ids.shape)
    ends_block = (positions + 1) % BLOCK == 0
    embedded = jnp.where(ends_block[..., None], 0, params.embed[next_ids])

    def attention(layer, x):
        _, kv = project_input(layer, x, config)
        frequencies = rope_frequencies(config, ds.AttentionType.SWA)
        entries = window_entry(layer, kv, positions, frequencies, config)
        _, y = attend_full_sequence(layer, x, draft_layer(config, 0), config, F32)
        return entries, y

    entries, residual = block(
        params.mtp.block,
        Residual.start(draft_input(params.mtp, embedded, streams, config)),
        next_ids,
        config,
        attention,
        backend=Backend.REFERENCE,
    )
    streams = residual.written()
    return entries, streams, draft_logits(params, streams, config)


@pytest.mark.slow
def test_rings_have_the_entries_of_kept_tokens(case, settled):
    params, streams, token_ids = case
    expected, _, _ = run_whole(params, streams, token_ids[:, 1:], config=CONFIG)
    ring = np.asarray(settled[0].state["swa"].window["values"][draft_layers(CONFIG)[0].family_idx])
    for row, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        for position in range(max(0, length - WINDOW), length):
            off = ring[slot, position % WINDOW] - expected[row, position]
            assert np.abs(off).max() < INTERMEDIATE, (row, position)


@pytest.mark.slow
def test_guesses_are_those_of_whole_sequences(case, settled):
    """Each is drawn as the trunk would draw at its position, and run with what it gave before."""
    params, streams, token_ids = case
    cache, read = settled
    rows, lengths = np.arange(len(SLOTS)), np.array(LENGTHS)
    sampling = ds.make_sampling(len(SLOTS), SETTINGS)
    slots = np.where(rows == NO_GUESS, -1, SLOTS)
    found, confidence = jax.jit(propose, static_argnames=("config", "draft_tokens"))(
        params,
        cache,
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        token_ids[rows, lengths],
        read,
        sampling,
        None,
        config=CONFIG,
        draft_tokens=DRAFTS,
    )
    assert confidence is None
    assert found.shape == (len(SLOTS), DRAFTS)
    room = ((0, 0), (0, max(0, lengths.max() + DRAFTS - streams.shape[1])))
    streams, next_ids = np.pad(streams, (*room, (0, 0), (0, 0))), np.pad(token_ids[:, 1:], room)
    for ahead in range(DRAFTS):
        place = lengths - 1 + ahead
        _, given, logits = run_whole(params, streams, next_ids, config=CONFIG)
        drawn, _ = jit_draw(
            logits[rows, place][:, None],
            sampling,
            jnp.asarray(place + 2, jnp.int32)[:, None],
            None,
            jnp.zeros((len(SLOTS), 0), jnp.int32),
            CONFIG.idea.sampler,
            None,
        )
        live = rows != NO_GUESS
        np.testing.assert_array_equal(np.asarray(found)[live, ahead], np.asarray(drawn)[live, 0])
        streams[rows, place + 1] = np.asarray(given)[rows, place]
        next_ids[rows, place + 1] = np.asarray(drawn)[:, 0]
