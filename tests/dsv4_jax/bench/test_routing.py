"""Different experts that rows pick: counted, by law, and as a model picks them."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench import routing
from dsv4_jax.cli import main
from dsv4_jax.config.layer_types import RouterType

pytestmark = pytest.mark.unoptimised

FLASH = dataclasses.replace(ds.DSV4Config.flash(), num_routed_experts=192)


def test_distinct_experts_are_counted_and_padding_is_none():
    picked = np.array([[[3, 1], [1, 0]], [[2, 5], [5, 2]], [[-1, -1], [-1, 0]]])
    np.testing.assert_array_equal(routing.count_distinct(picked), [3, 2, 1])


def test_neighbours_are_rows_that_follow_each_other_within_a_text():
    """Each row of a text picks what the one before did, but for one expert."""
    rows = np.arange(40)[:, None] + np.arange(3)
    texts = np.stack([rows, rows + 100])
    assert routing.of_neighbours(texts, 1) == 3
    assert routing.of_neighbours(texts, 6) == 8
    assert routing.of_strangers(texts, 6) > 15


def test_laws():
    assert routing.independent(FLASH, 6) == pytest.approx(33.3, abs=0.01)
    even = routing.zipf(FLASH, 6, exponent=0.0)
    assert even == pytest.approx(routing.independent(FLASH, 6), rel=0.01)
    some, more = (routing.zipf(FLASH, 6, exponent=exponent) for exponent in (0.5, 1.0))
    assert 6 < more < some < even
    assert routing.zipf(FLASH, 1, exponent=1.0) == 6


def test_picks_of_a_model_are_those_of_its_routers():
    config = ds.DSV4Config.tiny().without_draft()
    config = dataclasses.replace(
        config, layer_types=config.layer_types[:3], router_types=config.router_types[:3]
    )
    assert config.router_types[:2] == (RouterType.HASH,) * 2
    params = ds.init_params(config, jax.random.key(0))
    texts = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    picked = routing.picks_of_texts(config, params, texts)
    assert picked.shape == (3, 2, 24, config.num_experts_per_token)
    for layer, spec in enumerate(ds.layer_schedule(config)[:2]):
        table = np.asarray(params.layer(spec).ffn.tid2eid)
        np.testing.assert_array_equal(np.sort(picked[layer]), np.sort(table[texts]))
    assert len(np.unique(picked[2])) > config.num_experts_per_token


@pytest.mark.slow
def test_the_shipped_model_is_measured_on_its_held_out_text(capsys):
    assert main(["bench", "experts", "--texts", "1", "--length", "128"]) == 0
    said = capsys.readouterr().out
    assert "192 experts, 6 for a token:" in said
    assert "learned layers of the checkpoint" in said


def test_fewer_experts_than_a_token_picks_are_refused(capsys):
    assert main(["bench", "experts", "--experts", "5"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be at most num_routed_experts, got 6 and 5" in line
