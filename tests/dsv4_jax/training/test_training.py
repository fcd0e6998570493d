"""Text, batches, losses: what the shipped checkpoint was made with."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.model import param_shapes
from dsv4_jax.training.corpus import (
    BOS,
    EOS,
    byte_tokenizer,
    held_out_rows,
    read_corpus,
    read_held_out,
)
from dsv4_jax.training.losses import select_all, select_at_random, training_loss
from dsv4_jax.training.optimizer import rate_at
from dsv4_jax.training.train import (
    LARGE,
    SIZES,
    Plan,
    batches,
    large_config,
    main,
    shipped_config,
    starting_params,
    train,
)

pytestmark = pytest.mark.unoptimised

CONFIG = dataclasses.replace(
    shipped_config(),
    layer_types=(ds.AttentionType.CSA,),
    router_types=(ds.RouterType.LEARNED,),
    hidden_size=32,
    indexer_top_k=4,
    num_mtp_layers=0,
)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus()


def test_the_rate_rises_and_follows_a_cosine():
    for count, done in ((0, 0.0), (49, 0.1), (98, 0.3), (99, 0.3), (400, 0.5), (799, 0.9), (7, 1)):
        warm = min(1.0, (count + 1) / 100)
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
        rate = rate_at(3e-3, 100, count, done)
        assert (rate.shape, rate.dtype) == ((), jnp.float32)
        assert float(rate) == pytest.approx(3e-3 * warm * cosine, rel=1e-5)


@pytest.mark.slow
def test_the_parts_are_documents_of_bytes_and_share_none(corpus):
    documents = []
    for part in corpus:
        starts, ends = np.flatnonzero(part == BOS), np.flatnonzero(part == EOS)
        assert part.dtype == np.int32
        assert starts[0] == 0
        assert ends[-1] == len(part) - 1
        np.testing.assert_array_equal(starts[1:], ends[:-1] + 1)
        documents.append({part[a:b].tobytes() for a, b in zip(starts, ends, strict=True)})
    train_part, validation, held_out = documents
    assert not held_out & (train_part | validation)
    assert len(corpus.train) > 5 * len(corpus.validation) > 5 * len(corpus.held_out) > 100_000


@pytest.mark.parametrize("text", ["The import statement", "naïve — 🎉\n\t\x00\x7f", ""])
def test_tokens_are_bytes(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text).ids == [BOS, *text.encode()]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<eos>") == EOS


def test_the_shipped_tokenizer_is_that_one():
    shipped = (ds.SHIPPED_CHECKPOINT / "tokenizer.json").read_text()
    assert shipped == byte_tokenizer().to_str(pretty=True)


@pytest.mark.slow
def test_noise_is_in_what_is_read_and_not_in_what_should_be_said(corpus):
    read, text = next(batches(corpus.train, batch=16, length=512, noise=0.1, seed=0))
    assert 0.07 < np.mean(read != text) < 0.13
    assert np.all(read[text >= BOS] == text[text >= BOS])
    clean, same = next(batches(corpus.train, batch=16, length=512, noise=0.0, seed=0))
    np.testing.assert_array_equal(clean, same)


@pytest.mark.slow
def test_the_part_to_measure_on_is_the_same_when_read_alone(corpus):
    np.testing.assert_array_equal(read_held_out(), corpus.held_out)


def test_held_out_rows_follow_one_another():
    rows = held_out_rows(np.arange(100), 32)
    assert rows.shape == (3, 33)
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])


def is_indexer(path):
    return ".indexer" in jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize("dense", [False, True])
def test_the_indexer_learns_from_its_own_loss_alone_and_nothing_else_from_it(dense):
    params = starting_params(CONFIG, jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (2, 42), 0, 256)

    def grads_of(name):
        def loss(params):
            losses = training_loss(params, text, text, config=CONFIG, dense=jnp.asarray(dense))[1]
            return losses[name]

        grads = jax.jit(jax.grad(loss, allow_int=True))(params)
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        floats = [(p, g) for p, g in leaves if g.dtype == jnp.float32]
        inside = [np.abs(g).max() for p, g in floats if is_indexer(p)]
        outside = [np.abs(g).max() for p, g in floats if not is_indexer(p)]
        return inside, outside

    inside, outside = grads_of("index")
    assert min(inside) > 0
    assert max(outside) == 0
    inside, outside = grads_of("next")
    assert max(inside) == 0
    assert max(outside) > 0


@pytest.mark.slow
def test_selectors_take_as_many_as_the_indexer_or_all():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 8)), jnp.float32)
    visible = jnp.asarray([0, 1, 3, 4, 6, 8])
    selection = ds.attention.Selection(
        scores=scores,
        visible=visible[None],
        positions=jnp.arange(6)[None],
        top_k=4,
        queries=jnp.zeros((1, 6, 1, 4)),
        entries=jnp.zeros((1, 8, 4)),
    )
    for selector, limit in (
        (ds.attention.select_by_score, 4),
        (select_at_random, 4),
        (select_all, 8),
    ):
        chosen = np.asarray(selector(selection))[0]
        np.testing.assert_array_equal(chosen.sum(-1), np.minimum(visible, limit))
        assert not np.any(chosen & (np.arange(8)[None] >= np.asarray(visible)[:, None]))


@pytest.mark.slow
def test_a_few_steps_of_training_lower_the_loss(corpus, capsys):
    plan = Plan(num_steps=60, batch=8, length=96, rate=1e-2, steps_between_reports=20)
    with jax.numpy_dtype_promotion("standard"):  # optax adds integers to floats
        params = train(CONFIG, corpus, plan)
    reports = capsys.readouterr().out.splitlines()
    assert len(reports) == 3
    assert params.embed.dtype == jnp.bfloat16
    rows = jnp.asarray(corpus.validation[:97])[None]
    params = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, params)
    log_p = jax.nn.log_softmax(ds.forward(params, rows[:, :-1], config=CONFIG))
    loss = -jnp.mean(jnp.take_along_axis(log_p, rows[:, 1:, None], axis=-1))
    assert loss < 4.5, "uniform is 5.6"


@pytest.mark.slow
def test_a_training_that_pauses_ends_as_if_it_had_not(corpus, tmp_path, capsys):
    """After every step, with short rows and long ones."""
    plan = Plan(
        num_steps=7, batch=2, length=32, long_length=64, long_share=0.5, steps_between_reports=2
    )
    state = tmp_path / "state"
    with jax.numpy_dtype_promotion("standard"):
        whole = train(CONFIG, corpus, plan)
        told = capsys.readouterr().out
        for _ in range(6):
            assert train(CONFIG, corpus, plan, state=state, pause_minutes=0) is None
        resumed = train(CONFIG, corpus, plan, state=state, pause_minutes=0)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    reports = [json.loads(line) for line in (told + capsys.readouterr().out).splitlines()]
    for report in reports:
        del report["seconds"]
    assert reports[:4] == reports[4:]


def test_the_large_model_is_as_large_as_it_is_said_to_be():
    config = large_config()
    shapes = jax.tree.leaves(param_shapes(config, jnp.bfloat16))
    assert 30e6 < sum(math.prod(leaf.shape) for leaf in shapes) < 36e6
    assert config.max_position_embeddings == LARGE.long_length == 8192
    assert LARGE.minutes < 60


@pytest.mark.slow
def test_modules_with_their_code_are_in_one_part_each():
    whole = read_corpus(whole=True)
    documents = [
        {bytes(text) for text in np.split(part.astype(np.uint16), np.flatnonzero(part == BOS))}
        for part in whole
    ]
    train_part, validation, held_out = ({text for text in d if len(text) > 8} for d in documents)
    assert len(train_part) > 5 * len(validation | held_out) > 100
    # Python ships a few modules twice, in its own tests.
    assert len((validation | held_out) & train_part) < 0.02 * len(validation | held_out)
    # A Python without its own tests has 570 modules, of which four are to choose by.
    assert len(held_out) > len(validation) > 2


@pytest.mark.slow
def test_the_script_of_the_large_model_runs_from_end_to_end(tmp_path, monkeypatch, capsys):
    """With both kinds of rows; at a small size, and ended by its minutes."""
    small = dataclasses.replace(
        large_config(),
        **{name: getattr(CONFIG, name) for name in ("layer_types", "router_types", "hidden_size")},
        num_attention_heads=4,
        q_lora_rank=32,
        moe_intermediate_size=32,
        max_position_embeddings=256,
    )
    plan = dataclasses.replace(
        LARGE, batch=2, length=64, long_length=256, num_steps=8, steps_between_reports=3
    )
    text = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint16)
    text[::500] = BOS
    np.savez(tmp_path / "text.npz", train=text, validation=text, held_out=text)
    command = ["train", "--size", "large", "--corpus", str(tmp_path / "text.npz")]
    monkeypatch.setitem(SIZES, "large", (lambda: small, plan))
    # XLA has read this process's flags long ago, which the script sets in a new one.
    monkeypatch.setattr("dsv4_jax.training.train.set_xla_flags", lambda **flags: flags)
    monkeypatch.setattr("sys.argv", [*command, "--out", str(tmp_path / "model")])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        main()
        reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
        assert [report["step"] for report in reports] == [3, 6, 8]
        config, params = ds.load_checkpoint(tmp_path / "model", dtype=jnp.float32)
        assert config == small
        assert np.isfinite(ds.forward(params, jnp.asarray([[256, 65]]), config=config)).all()
        assert (tmp_path / "model" / "tokenizer.json").exists()
        short = dataclasses.replace(plan, minutes=1e-6)
        monkeypatch.setitem(SIZES, "large", (lambda: small, short))
        main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 1
