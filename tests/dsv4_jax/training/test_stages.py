"""DSpark stages learn what the trunk says, and the trunk stays as it is."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dsv4_jax as ds
from dsv4_jax.training.corpus import BOS, EOS, Corpus
from dsv4_jax.training.rounds import evaluate
from dsv4_jax.training.stage_losses import DEPTH_FACTOR, UNREACHED_WEIGHT, compare
from dsv4_jax.training.stages import (
    StagePlan,
    anchored_rows,
    main,
    starting_stages,
    train_stages,
    with_stages,
)
from dsv4_jax.training.train import shipped_config

pytestmark = pytest.mark.unoptimised

TRUNK = dataclasses.replace(
    shipped_config(),
    layer_types=(ds.AttentionType.CSA,),
    router_types=(ds.RouterType.LEARNED,),
    hidden_size=32,
    moe_intermediate_size=32,
    sliding_window=16,
)
CONFIG = with_stages(TRUNK, markov_rank=16)
FIRST_LETTER = 97


def random_corpus():
    text = np.random.default_rng(0).integers(97, 101, 3000, np.int32)
    text[::500] = BOS
    return Corpus(text, text, text)


def test_the_shipped_model_gets_three_stages_in_the_place_of_its_block():
    config = with_stages(shipped_config())
    assert config.num_mtp_layers == 0
    assert config.dspark.target_layers == (3, 4, 5)
    assert config.dspark.noise_token_id == EOS
    assert dataclasses.replace(config, dspark=None, num_mtp_layers=1) == shipped_config()


@pytest.mark.slow
def test_stages_start_as_the_block_of_the_trunk():
    params = ds.init_params(TRUNK, jax.random.key(0), jnp.bfloat16)
    stages = starting_stages(CONFIG, params, jax.random.key(1))
    for layer in stages.layers:
        jax.tree.map(
            lambda own, given: np.testing.assert_array_equal(own, given.astype(own.dtype)),
            layer,
            params.mtp.block,
        )
    assert stages.markov_w1.dtype == stages.norm.dtype == jnp.float32
    without = dataclasses.replace(params, mtp=None)
    assert np.all(starting_stages(CONFIG, without, jax.random.key(1)).norm == 1)


def test_anchors_have_a_token_before_them_and_a_block_behind():
    plan = StagePlan(batch=4, length=16, num_anchors=200)
    read, anchors = next(anchored_rows(random_corpus(), plan, 5))
    assert read.shape == (4, 16)
    assert anchors.shape == (4, 200)
    assert (anchors.min(), anchors.max()) == (1, 16 - 1 - 5)


def test_a_guess_counts_in_full_where_the_text_is_what_the_trunk_would_say():
    """Two blocks of two; the trunk's likeliest tokens are 1 and 2, and those of the text 1 and 0.

    So the second guess of the first block is reached, and that of the second block is not.
    """
    targets = np.log(np.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]], np.float32))
    targets = np.stack([targets, targets])
    logits = np.log(np.full((2, 2, 3), 1 / 3, np.float32))
    logits[0, 0] = targets[0, 0]
    logits[:, 1, 2] += 1e-3
    logits[1, 0, 2] += 1e-3
    text = np.array([[1, 2], [0, 2]], np.int32)
    confidence = np.array([[3.0, 0.0], [-3.0, 0.0]], np.float32)
    found = compare(*map(jnp.asarray, (logits, confidence, targets, text)))
    # Agrees: first block both, second block only at depth two, which is not reached.
    assert found.agreement.tolist() == [0.5, 1.0]
    weight = np.array([[1, DEPTH_FACTOR], [1, DEPTH_FACTOR * UNREACHED_WEIGHT]])
    weight /= weight.sum()
    first = np.log(3) + np.sum([p * np.log(p) for p in (0.2, 0.5, 0.3)])
    second = np.log(3) + np.sum([p * np.log(p) for p in (0.1, 0.1, 0.8)])
    divergence = weight[1, 0] * first + weight[:, 1].sum() * second
    assert float(found.divergence) == pytest.approx(divergence, rel=2e-3)
    doubt = np.log1p(np.exp(-3.0)) * weight[:, 0].sum() + np.log(2) * weight[:, 1].sum()
    assert float(found.confidence) == pytest.approx(doubt, rel=1e-5)


def counting_trunk():
    """Says the next of 16 letters after each; sublayers give nothing."""

    def silent(path, leaf):
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        return jnp.zeros_like(leaf) if name in ("wo_b", "w2", "shared_w2") else leaf

    params = ds.init_params(TRUNK, jax.random.key(0), jnp.bfloat16)
    block = params.mtp
    params = jax.tree.map_with_path(silent, params)
    embed, head = np.zeros((2, TRUNK.vocab_size, TRUNK.hidden_size), np.float32)
    letters = FIRST_LETTER + np.arange(16)
    embed[letters], embed[BOS, 16] = np.eye(16, TRUNK.hidden_size), 1
    head[np.roll(letters, -1)] = 2 * embed[letters]
    head[FIRST_LETTER] += 2 * embed[BOS]
    return dataclasses.replace(
        params,
        embed=jnp.asarray(embed, jnp.bfloat16),
        head=jnp.asarray(head, jnp.bfloat16),
        norm=jnp.ones_like(params.norm),
        mtp=block,
    )


@pytest.mark.slow
def test_stages_learn_what_the_trunk_says_and_leave_it(capsys):
    """Rounds then keep nearly all, so that training and rounds agree on which token is which."""
    rng = np.random.default_rng(0)
    jumps = np.where(rng.random(4000) < 0.1, rng.integers(0, 16, 4000), 1)
    text = (FIRST_LETTER + np.cumsum(jumps) % 16).astype(np.int32)
    text[::500] = BOS
    params = counting_trunk()
    before = jax.tree.map(np.array, dataclasses.replace(params, mtp=None))
    plan = StagePlan(
        num_steps=200,
        batch=4,
        length=48,
        num_anchors=16,
        rate=1e-2,
        noise=0.0,
        steps_between_reports=50,
    )
    with jax.numpy_dtype_promotion("standard"):  # optax adds integers to floats
        trained = train_stages(CONFIG, params, Corpus(text, text, text), plan)
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["step"] for report in reports] == [50, 100, 150, 200]
    assert reports[-1]["divergence"] < 0.2 * reports[0]["divergence"]
    assert reports[-1]["confidence"] < reports[0]["confidence"]
    told = evaluate(CONFIG, trained, text, num_prompts=8, prompt_length=24, num_rounds=6)
    assert told["tokens_a_round"] > 5
    assert abs(told["expected_tokens"] - told["tokens_a_round"]) < 0.5
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(trained, mtp=None), before)
    shapes = ds.model.param_shapes(CONFIG, jnp.bfloat16)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), trained) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )


@pytest.mark.slow
def test_the_script_writes_a_checkpoint_with_the_trunk_of_the_other(tmp_path, monkeypatch, capsys):
    """In one step, after which its minutes have passed."""
    params = ds.init_params(TRUNK, jax.random.key(0), jnp.bfloat16)
    ds.save_checkpoint(TRUNK, params, tmp_path / "trunk")
    (tmp_path / "trunk" / "tokenizer.json").write_text("{}")
    np.savez(tmp_path / "text.npz", **random_corpus()._asdict())
    command = ["stages", "--checkpoint", str(tmp_path / "trunk"), "--out", str(tmp_path / "out")]
    command += ["--corpus", str(tmp_path / "text.npz"), "--minutes", "1e-6", "--batch", "2"]
    command += ["--length", "48", "--anchors", "8", "--markov-rank", "16", "--evaluate"]
    monkeypatch.setattr("sys.argv", command)
    # XLA has read this process's flags long ago, which the script sets in a new one.
    monkeypatch.setattr("dsv4_jax.training.stages.set_xla_flags", lambda **flags: flags)
    with jax.numpy_dtype_promotion("standard"):
        main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines[:-1]] == [1]
    assert 1 <= lines[-1]["tokens_a_round"] <= 6
    config, _ = ds.load_checkpoint(tmp_path / "out")
    assert config == CONFIG
    before = load_file(tmp_path / "trunk" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    own = {name for name in before if not name.startswith("mtp.")}
    assert own
    assert own == {name for name in after if not name.startswith("mtp.")}
    assert len(after) > len(before)
    for name in own:
        np.testing.assert_array_equal(before[name].view(np.uint8), after[name].view(np.uint8))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
