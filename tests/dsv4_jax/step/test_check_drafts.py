"""Which drafts of a step are checked: as far as each row's confidences go."""

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.cache.snapshots import SnapshotPlan
from dsv4_jax.cache.step_input import index_call
from dsv4_jax.step.check_drafts import cut_drafts
from dsv4_jax.step.sampling import make_sampling
from dsv4_jax.step.serve_values import ServeInput, ServeOutput

DRAFTS = 3
jit_cut = jax.jit(cut_drafts, static_argnums=4)
jit_index = jax.jit(index_call, static_argnames=("block_tokens", "max_row_tokens"))
LEVEL = np.log(0.8 / 0.2)  # of a draft that is kept with 0.8: 0.8, 0.64, 0.512 of the three


def cut(least, *, confidence=LEVEL, guessed=(11, 12, 13), counts=(4, 4, 2)):
    """What is left of rows whose last tokens are drafts, one with a prompt's tokens before it."""
    rows = np.repeat(np.arange(3), counts)
    token_ids = np.array([10, 11, 12, 13, 10, 11, 12, 13, 10, 11], np.int32)
    step = ds.StepInput(
        token_ids=token_ids,
        request_ids=rows.astype(np.int32),
        request_slots=np.arange(3, dtype=np.int32),
    )
    call = jit_index(
        np.array([5, 9, 0], np.int32),
        np.zeros((3, 1), np.int32),
        step,
        block_tokens=128,
        max_row_tokens=10,
    )
    nothing = np.full(3, -1, np.int32)
    given = ServeInput(
        step_input=step,
        num_checked=np.array([4, 3, 1], np.int32),
        next_token_ids=nothing,
        sampling=make_sampling(3),
        snapshots=SnapshotPlan(rows=nothing, ends=nothing, places=nothing),
        least_survival=None if least is None else np.float32(least),
    )
    drafts = np.array([guessed, (12, 13, 0), (0, 0, 0)], np.int32)
    last = ServeOutput.of(
        jnp.zeros((3, DRAFTS + 1), jnp.int32),
        jnp.ones(3, jnp.int32),
        drafts,
        None,
        confidence=None if confidence is None else jnp.full((3, DRAFTS), confidence),
    )
    left, checked = jit_cut(call, token_ids, given, last, DRAFTS)
    return left.segment_ids.tolist(), left.row_counts.tolist(), checked.tolist()


def test_a_row_is_cut_where_all_its_drafts_together_are_too_unlikely():
    """0.8, 0.64 and 0.512: by each row's own bound. A prompt's tokens are no drafts."""
    segments, counts, checked = cut([0.6, 0.7, 1.0])
    assert segments == [0, 0, 0, -1, 1, 1, 1, -1, 2, 2]
    assert (counts, checked) == ([3, 3, 2], [3, 2, 1])
    assert cut([0.9, 0.5, 0.0])[2] == [1, 3, 1]


def test_without_a_bound_all_are_checked():
    whole = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2], [4, 4, 2], [4, 3, 1]
    assert cut(None) == cut([0.0, 0.0, 0.0]) == whole


def test_drafts_that_the_step_before_did_not_guess_are_all_checked():
    """As those that the host gives; the confidences are of others."""
    assert cut([1.0, 1.0, 1.0], guessed=(11, 99, 13))[2] == [4, 1, 1]


def test_drafts_without_confidences_are_all_checked():
    """Those of an MTP block."""
    assert cut([1.0, 1.0, 1.0], confidence=None)[2] == [4, 3, 1]
