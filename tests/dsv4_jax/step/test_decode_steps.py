"""Several decode steps in one call leave the bits of as many calls of one step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.snapshots import SnapshotPlan
from dsv4_jax.step.decode_steps import jit_plain_decode_steps
from dsv4_jax.step.serve_step import jit_plain_decode_step, jit_serve_step
from dsv4_jax.step.serve_values import LAST_DRAWN, ServeInput, ServeOutput
from helpers.arrays import on_device
from helpers.serving import CONFIG, params, prompt

ROWS, STEPS = 4, 6
SLOTS = on_device(np.arange(ROWS), jnp.int32)
LENGTHS = (5, 130, 17)  # of three rows; the fourth is idle


def serve_input(token_ids, request_ids, **fields):
    nothing = jnp.full(ROWS, -1, jnp.int32)
    sampling = ds.make_sampling(ROWS, ds.SamplingParams(temperature=0.9, seed=3))
    return ServeInput(
        step_input=ds.StepInput(
            token_ids=jnp.asarray(token_ids, jnp.int32),
            request_ids=jnp.asarray(request_ids, jnp.int32),
            request_slots=SLOTS,
        ),
        num_checked=jnp.ones(ROWS, jnp.int32),
        next_token_ids=nothing,
        sampling=sampling,
        snapshots=SnapshotPlan(rows=nothing, ends=nothing, places=nothing),
        **fields,
    )


@pytest.fixture(scope="module")
def after_prompts():
    """A function that gives a cache with three prompts, and what the step drew."""
    rng = np.random.default_rng(0)
    texts = [prompt(rng, length) for length in LENGTHS]
    tokens = np.concatenate(texts)
    rows = np.repeat(np.arange(len(texts)), LENGTHS)

    def build():
        sizes = {"max_requests": ROWS, "max_context_tokens": 256, "cache_format": "fp8_ue8m0"}
        cache = ds.init_cache(CONFIG, **sizes)
        store = ds.cache.init_snapshot_store(cache, 1)
        last = ServeOutput.empty(ROWS, 0, CONFIG.vocab_size, num_steps=STEPS)
        static = {"config": CONFIG, "draft_tokens": 0}
        call = serve_input(tokens, rows)
        cache, _, last = jit_serve_step(params(), cache, store, call, last, **static)
        return cache, last

    return build


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [[6, 6, 6, 0], [6, 2, 3, 0], [1, 6, 0, 0]])
def test_each_row_has_the_bits_of_its_own_single_steps(after_prompts, num_steps):
    """Tokens of rows come in any order, and one of them stands for nobody."""
    order = np.array([2, 0, -1, 1])
    taken = jnp.asarray(num_steps, jnp.int32)
    cache, last = after_prompts()
    assert last.columns.shape == (ROWS, 2 * STEPS + 1)
    call = serve_input([LAST_DRAWN] * ROWS, order, num_steps=taken)
    cache, several = jit_plain_decode_steps(
        params(), cache, call, last, config=CONFIG, num_steps=STEPS
    )
    single, last = after_prompts()
    drawn = np.full((ROWS, STEPS), -1)
    for number in range(STEPS):
        live = np.where(number < np.array(num_steps)[order], order, -1)
        call = serve_input([LAST_DRAWN] * ROWS, live)
        single, out = jit_plain_decode_step(params(), single, call, last, config=CONFIG)
        drawn[:, number] = out.token_ids[:, 0]
        # A row that is idle keeps what it drew last.
        kept = jnp.where(out.token_ids[:, :1] >= 0, out.token_ids[:, :1], drawn[:, :1])
        last = dataclasses.replace(out, columns=out.columns.at[:, :1].set(kept))
    np.testing.assert_array_equal(several.token_ids, drawn)
    np.testing.assert_array_equal(several.num_kept, num_steps)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(single), strict=True):
        np.testing.assert_array_equal(
            np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)
        )


@pytest.mark.slow
def test_outputs_are_as_wide_as_the_one_before(after_prompts):
    """So that each program finds the place of the last output, whatever made it."""
    cache, last = after_prompts()
    call = serve_input([LAST_DRAWN] * ROWS, [0, 1, 2, -1])
    _, out = jit_plain_decode_step(params(), cache, call, last, config=CONFIG)
    assert out.columns.shape == (ROWS, 2 * STEPS + 1)
    np.testing.assert_array_equal(out.token_ids[:, 1:], -1)
    np.testing.assert_array_equal(out.num_kept, [1, 1, 1, 0])
    np.testing.assert_array_equal(out.num_drafts, np.zeros((ROWS, STEPS)))
    assert out.draft_token_ids.shape == (ROWS, 0)
