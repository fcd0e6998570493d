"""Rounds of drafts are counted as they are: on a model whose answers are known by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.model.dspark import chain, choose_likeliest
from dsv4_jax.model.dspark_sequence import context_entries, guess_block
from dsv4_jax.model.forward import forward_means
from dsv4_jax.training.rounds import Rounds, evaluate, run_round, run_rounds, summarise
from helpers.tolerance import INTERMEDIATE
from pallas_kernels.common.formats import get_cache_format

pytestmark = pytest.mark.unoptimised

F32 = get_cache_format("f32")
V = 16
CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    vocab_size=V,
    hidden_size=32,
    layer_types=(ds.AttentionType.SWA,),
    router_types=(ds.RouterType.LEARNED,),
    num_mtp_layers=0,
    bos_token_id=None,
    eos_token_ids=(10,),
    dspark=DSparkConfig(
        block_size=5, markov_rank=V, noise_token_id=0, target_layers=(0,), num_stages=1
    ),
)
WRONG = 7
"""The token after which the draft guesses another than the trunk."""


@pytest.fixture(scope="module")
def counting():
    """A trunk that says t + 1 after t, and a draft that says so too, but for one token.

    Sublayers give nothing, so that the streams are the last token's embedding. The draft reads no
    stream, only the token before.
    """

    def silent(path, leaf):
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        return jnp.zeros_like(leaf) if name in ("wo_b", "w2", "shared_w2") else leaf

    params = jax.tree.map_with_path(silent, ds.init_params(CONFIG, jax.random.key(0)))
    follows = np.eye(V, dtype=np.float32)[(np.arange(V) - 1) % V]  # row t + 1 is one at t
    guessed = follows.copy()
    guessed[:, WRONG] = np.eye(V)[3]
    hints = np.where(np.arange(V) == WRONG, -2.0, 2.0)
    draft = dataclasses.replace(
        params.mtp,
        norm=jnp.zeros_like(params.mtp.norm),
        markov_w1=jnp.eye(V),
        markov_w2=jnp.asarray(guessed),
        confidence=jnp.asarray(np.concatenate([np.zeros(32), hints]), jnp.float32),
    )
    wide = np.zeros((V, 32 - V), np.float32)
    return dataclasses.replace(
        params,
        embed=jnp.asarray(np.concatenate([np.eye(V, dtype=np.float32), wide], axis=1)),
        head=jnp.asarray(np.concatenate([follows, wide], axis=1)),
        norm=jnp.ones_like(params.norm),
        mtp=draft,
    )


PROMPTS = np.array([[0, 1, 2], [5, 5, 5]], np.int32)


@pytest.mark.slow
def test_drafts_are_kept_as_far_as_the_trunk_says_the_same(counting):
    """Of the first prompt: 3, then 4 5 6 7 | 8, then 9 to 13 | 14, 15 to 3 | 4, 5 6 7 | 8.

    Of the second one: 6, then 7 | 8, and so on as the first one does. Both end at 10.
    """
    rounds, texts = run_rounds(counting, PROMPTS, 4, config=CONFIG)
    assert rounds.kept.tolist() == [[4, 1], [5, 5], [5, 5], [3, 3]]
    assert texts[0].tolist() == [0, 1, 2, *[token % V for token in range(3, 3 + 1 + 17 + 4)]]
    assert texts[1].tolist() == [5, 5, 5, *[token % V for token in range(6, 6 + 1 + 14 + 4)]]
    sure, unsure = 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2))
    np.testing.assert_allclose(rounds.confidence[0, 0], [sure] * 4 + [unsure], rtol=1e-5)
    np.testing.assert_allclose(rounds.confidence[0, 1, :2], [sure, unsure], rtol=1e-5)
    assert rounds.counts.tolist() == [[True, True], [True, True], [False, False], [False, False]]


@pytest.mark.slow
def test_drafts_are_of_the_settled_text_alone(counting):
    """With random stages, and other tokens behind the text."""
    random = ds.init_params(CONFIG, jax.random.key(2))
    params = dataclasses.replace(counting, mtp=random.mtp)
    behind = np.random.default_rng(0).integers(0, V, (2, 36), np.int32)
    lengths = jnp.full((2,), 3, jnp.int32)
    token_ids = np.concatenate([PROMPTS, behind], axis=1)
    found = run_round(params, jnp.asarray(token_ids), lengths, jnp.int32(0), config=CONFIG)
    anchors = jnp.array([3, 6], jnp.int32)

    @jax.jit
    def alone(params, prompts):
        _, means = forward_means(params, prompts, (0,), config=CONFIG)
        places = jnp.broadcast_to(jnp.arange(3)[None], (2, 3))
        entries = context_entries(params, means, places, CONFIG, F32)
        guesses = guess_block(params, anchors, lengths, entries, config=CONFIG, fmt=F32)
        return chain(params, anchors, guesses, choose_likeliest)

    drafts = alone(params, jnp.asarray(PROMPTS))
    assert np.abs(found.drafts.logits - drafts.logits).max() < INTERMEDIATE
    assert np.abs(found.drafts.confidence - drafts.confidence).max() < INTERMEDIATE
    assert found.token_ids[:, 3:9].tolist() == np.c_[anchors, drafts.token_ids].tolist()


@pytest.mark.slow
def test_what_is_measured_is_a_part_of_the_text(counting):
    """Prompts are 1 2 3 and 6 7 8, from its beginning and its end."""
    text = np.array([0, 1, 2, 3, 6, 7, 8], np.int32)
    told = evaluate(CONFIG, counting, text, num_prompts=2, prompt_length=3, num_rounds=4)
    # 4, then 5 6 7 | 8, then 9 to 13 | 14; and 9, then 10 and all others.
    assert told["rounds"] == 3
    assert told["tokens_a_round"] == pytest.approx(1 + (3 + 5 + 5) / 3)


def test_rounds_are_summed_up_by_depth_and_by_confidence():
    rounds = Rounds(
        kept=np.array([[2, 0], [1, 2]]),
        confidence=np.array([[[0.9, 0.7], [0.1, 0.9]], [[0.95, 0.5], [0.3, 0.3]]]),
        counts=np.array([[True, True], [True, False]]),
    )
    told = summarise(rounds)
    assert told["rounds"] == 3
    assert told["tokens_a_round"] == pytest.approx(2)
    assert told["kept"] == pytest.approx([2 / 3, 1 / 3])
    assert told["kept_if_reached"] == pytest.approx([2 / 3, 1 / 2])
    expected = 1 + (0.9 + 0.63 + 0.1 + 0.09 + 0.95 + 0.475) / 3
    assert told["expected_tokens"] == pytest.approx(expected)
    # Checked are 0.9 and 0.7, both kept; 0.1, not kept; 0.95, kept, and 0.5, not kept.
    wanted = [[1, 0.1, 0], [1, 0.5, 0], [1, 0.7, 1], [2, 0.925, 1]]
    np.testing.assert_allclose(told["calibration"], wanted, rtol=1e-12)
    assert told["calibration_error"] == pytest.approx((0.1 + 0.5 + 0.3 + 2 * 0.075) / 5)


def test_a_model_without_stages_is_refused():
    with pytest.raises(ValueError, match="config must have DSpark stages, got dspark=None"):
        run_rounds(None, PROMPTS, 1, config=CONFIG.without_draft())
