"""Rounds of drafts are counted as they are: on a model whose answers are known by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.training.rounds import Rounds, evaluate, run_rounds, summarise

pytestmark = pytest.mark.unoptimised

V = 16
CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    vocab_size=V,
    hidden_size=32,
    layer_types=(ds.AttentionType.SWA,),
    router_types=(ds.RouterType.LEARNED,),
    num_mtp_layers=0,
    bos_token_id=None,
    eos_token_ids=(),
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


def test_drafts_are_kept_as_far_as_the_trunk_says_the_same(counting):
    """Of the first prompt: 3, then 4 5 6 7 | 8, then 9 to 13 | 14, 15 to 3 | 4, 5 6 7 | 8.

    Of the second one: 6, then 7 | 8, and so on as the first one does.
    """
    rounds, texts = run_rounds(counting, PROMPTS, 4, config=CONFIG)
    assert rounds.kept.tolist() == [[4, 1], [5, 5], [5, 5], [3, 3]]
    assert texts[0].tolist() == [0, 1, 2, *[token % V for token in range(3, 3 + 1 + 17 + 4)]]
    assert texts[1].tolist() == [5, 5, 5, *[token % V for token in range(6, 6 + 1 + 14 + 4)]]
    sure, unsure = 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2))
    np.testing.assert_allclose(rounds.confidence[0, 0], [sure] * 4 + [unsure], rtol=1e-5)
    np.testing.assert_allclose(rounds.confidence[0, 1, :2], [sure, unsure], rtol=1e-5)
    assert rounds.counts.all()


def test_an_answer_that_has_ended_counts_no_more(counting):
    ending = dataclasses.replace(CONFIG, eos_token_ids=(10,))
    rounds, _ = run_rounds(counting, PROMPTS, 3, config=ending)
    assert rounds.counts.tolist() == [[True, True], [True, True], [False, False]]
    told = evaluate(ending, counting, np.arange(200) % V, num_prompts=2, prompt_length=3)
    assert told["rounds"] < 2 * 16


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
