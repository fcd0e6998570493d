"""A decode step in two programs leaves the bits of one: its tokens, log-probabilities and cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.snapshots import SnapshotPlan
from dsv4_jax.step.draws import DrawnCounts, TokenMasks
from dsv4_jax.step.plain_step import jit_plain_draw, jit_plain_trunk
from dsv4_jax.step.sampling import SamplingParams, stack_sampling
from dsv4_jax.step.serve_step import jit_plain_decode_step
from dsv4_jax.step.serve_values import LAST_DRAWN, ServeInput, ServeOutput
from dsv4_jax.step.settings_size import mask_words
from helpers.serving import CONFIG, params

ROWS, STEPS, VOCAB = 5, 6, CONFIG.vocab_size
ASKED = [
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, logit_bias={5: 2.0}),
    SamplingParams(temperature=1.3, seed=4, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=5, top_k=7, min_p=0.01, logprobs=0),
    SamplingParams(),
]
ORDER = [2, 0, -1, 3, 1]
"""Rows of tokens in any order; one of them stands for nobody, and the last row is idle."""


def call_of(number, allowed):
    """The step of that number, whose first row may draw `allowed` alone."""
    first = np.array([7, 11, 0, 13, 2], np.int32)
    nothing = jnp.full(ROWS, -1, jnp.int32)
    entries = np.array([[2, 2, -1], [4, 9, 0], [1, 2, 0]], np.int32)
    bits = np.zeros((ROWS, 1, mask_words(VOCAB)), np.uint32)
    for token in allowed:
        bits[0, 0, token // 32] |= np.uint32(1 << token % 32)
    return ServeInput(
        step_input=ds.StepInput(
            token_ids=jnp.asarray(np.full(ROWS, LAST_DRAWN) if number else first, jnp.int32),
            request_ids=jnp.asarray(ORDER, jnp.int32),
            request_slots=jnp.arange(ROWS, dtype=jnp.int32),
        ),
        num_checked=jnp.ones(ROWS, jnp.int32),
        next_token_ids=nothing,
        sampling=jax.tree.map(jnp.asarray, stack_sampling(ASKED, with_stops=False)),
        snapshots=SnapshotPlan(rows=nothing, ends=nothing, places=nothing),
        counts=DrawnCounts(**dict(zip(("rows", "token_ids", "counts"), entries, strict=True))),
        masks=TokenMasks(is_masked=jnp.arange(ROWS) == 0, bits=jnp.asarray(bits)),
    )


@pytest.mark.slow
def test_two_programs_leave_the_bits_of_one():
    caches, lasts = [], []
    for _ in range(2):
        caches.append(ds.init_cache(CONFIG, max_requests=ROWS, max_context_tokens=256))
        lasts.append(ServeOutput.empty(ROWS, 0, VOCAB))
    drawn = []
    for number in range(STEPS):
        call = call_of(number, allowed=(number, number + 40))
        caches[0], lasts[0] = jit_plain_decode_step(
            params(), caches[0], call, lasts[0], config=CONFIG
        )
        caches[1], rows = jit_plain_trunk(
            params(), caches[1], call.step_input, lasts[1], config=CONFIG
        )
        lasts[1] = jit_plain_draw(rows, call.draws, lasts[1], config=CONFIG)
        one, other = (
            jax.tree.leaves((cache, last)) for cache, last in zip(caches, lasts, strict=True)
        )
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
            )
        drawn.append(np.asarray(lasts[0].token_ids)[:, 0])
        assert drawn[-1][0] in (number, number + 40)
    drawn = np.array(drawn)
    assert (drawn[:, 4] == -1).all()
    assert (drawn[:, :4] >= 0).all()
    assert len(np.unique(drawn)) > 8
