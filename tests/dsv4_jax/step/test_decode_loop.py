"""decode_loop against decode_step and sample, called one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers import serving, slow

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def model():
    """Of one layer, a kind that compiles soon: what a loop does lies around them."""
    return serving.one_layer(ds.AttentionType.SWA, num_mtp_layers=0)


SIMPLE = {"temperature": 0.8, "min_p": 0.01}
FULL = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
GREEDY = FULL | {"temperature": 0.0}


def start(config):
    cache = ds.init_cache(config, max_requests=3, max_context_tokens=64, cache_format="f32")
    call = ds.StepInput(
        token_ids=jnp.asarray([1, 2, 3], jnp.int32),
        request_ids=jnp.asarray([0, 1, -1], jnp.int32),
        request_slots=jnp.asarray([2, 0, -1], jnp.int32),
    )
    return cache, call


def step_by_step(config, params, sampling, num_steps):
    cache, call = start(config)
    step = jax.jit(ds.decode_step, static_argnames="config")
    sample = jax.jit(ds.sample)
    token_ids, drawn = call.token_ids, []
    for _ in range(num_steps):
        call = call.replace(token_ids=token_ids)
        cache, logits = step(params, cache, call, config=config)
        positions = np.asarray(cache.length_tokens)[np.maximum(call.request_slots, 0)]
        token_ids = sample(logits, sampling, positions)
        drawn.append(np.asarray(token_ids))
    return cache, np.stack(drawn, axis=1)


@pytest.mark.parametrize("settings", slow.all_but([SIMPLE], [SIMPLE, FULL, GREEDY]))
def test_loop_draws_what_single_steps_draw(model, settings):
    """By default by the program of simple draws, which compiles in less time."""
    config, params = model
    sampling = ds.make_sampling(3, seed=[5, 6, 7], **settings)
    cache, call = start(config)
    cache, drawn = ds.jit_decode_loop(params, cache, call, sampling, num_steps=12, config=config)
    expected_cache, expected = step_by_step(config, params, sampling, 12)
    np.testing.assert_array_equal(drawn[:2], expected[:2])
    np.testing.assert_array_equal(drawn[2], np.full(12, -1))
    np.testing.assert_array_equal(cache.length_tokens, expected_cache.length_tokens)


def test_a_stopped_row_goes_idle_and_the_others_go_on(model):
    config, params = model
    free = ds.make_sampling(3)
    cache, call = start(config)
    _, drawn = ds.jit_decode_loop(params, cache, call, free, num_steps=12, config=config)
    stop = int(drawn[0, 4])
    first = int(np.argmax(np.asarray(drawn[0]) == stop))
    stopping = ds.make_sampling(3, stop_token_ids=[stop])
    cache, call = start(config)
    cache, halted = ds.jit_decode_loop(params, cache, call, stopping, num_steps=12, config=config)
    np.testing.assert_array_equal(halted[0, : first + 1], drawn[0, : first + 1])
    np.testing.assert_array_equal(halted[0, first + 1 :], np.full(11 - first, -1))
    assert int(cache.length_tokens[2]) == first + 1
    if stop not in np.asarray(drawn[1]):
        np.testing.assert_array_equal(halted[1], drawn[1])
        assert int(cache.length_tokens[0]) == 12
