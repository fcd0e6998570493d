"""Different experts that rows pick: counted, by law, and as a model picks them."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench import routing, routing_laws
from dsv4_jax.bench.decode_case import CaseSetup, DecodeCase
from dsv4_jax.bench.weights import random_params, with_routing
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
    even = routing_laws.expected_experts(FLASH, rows=6)
    assert even == pytest.approx(33.3, abs=0.01)
    some, more = (
        routing_laws.expected_experts(FLASH, rows=6, exponent=exponent) for exponent in (0.5, 1.0)
    )
    assert 6 < more < some < even
    assert more == pytest.approx(25.9, abs=0.1)
    assert routing_laws.expected_experts(FLASH, rows=1, exponent=1.0) == pytest.approx(6)


@pytest.mark.parametrize("law", list(routing_laws.LAWS))
def test_routers_with_the_bias_of_a_law_pick_by_it(law):
    """Logits are normal, as those of random weights are; the order is that of a layer's seed."""
    rng, exponent = np.random.default_rng(1), routing_laws.LAWS[law]
    logits = rng.standard_normal((200, 64, FLASH.num_routed_experts))
    bias = routing_laws.router_bias(FLASH, law, 3)
    picked = np.argsort(-np.sqrt(np.logaddexp(0, logits)) - bias, axis=-1)[..., :6]
    wanted = routing_laws.expected_experts(FLASH, rows=64, exponent=exponent)
    assert routing.count_distinct(picked).mean() == pytest.approx(wanted, rel=0.03)
    share = np.bincount(picked.ravel(), minlength=192) / (200 * 64)
    chances = routing_laws.pick_chances(192, 6, exponent)
    np.testing.assert_allclose(np.sort(share)[::-1][:40], chances[:40], rtol=0.15)
    if exponent:
        assert np.argmax(routing_laws.router_bias(FLASH, law, 4)) != np.argmax(bias)


def test_tables_of_hash_layers_follow_a_law():
    shape = (4096, 6)
    for law, exponent in routing_laws.LAWS.items():
        table = np.asarray(routing_laws.expert_table(shape, FLASH, law, 5))
        assert table.min() >= 0
        assert table.max() < 192
        assert all(len(set(row)) == 6 for row in table[:100].tolist())
        found = routing.count_distinct(table.reshape(64, 64, 6)).mean()
        wanted = routing_laws.expected_experts(FLASH, rows=64, exponent=exponent)
        assert found == pytest.approx(wanted, rel=0.03)


@pytest.mark.slow
def test_rows_of_a_random_model_pick_as_many_experts_as_the_law_says():
    """A bias that is drawn like other weights would favour the same experts for all rows."""
    config = dataclasses.replace(
        ds.DSV4Config.tiny().without_draft(), num_routed_experts=96, num_experts_per_token=6
    )
    case = DecodeCase(batch=24, context=64, bucket_context=64, cache_format="fp8_ue8m0")
    setup, params = CaseSetup(config, case), random_params(config)
    picks = routing.picks_call(config, "fp8")
    for law, exponent in routing_laws.LAWS.items():
        routed = with_routing(params, config, law)
        assert routed.embed is params.embed
        layers = picks(routed, setup.fill(), setup.step_input)
        assert len(layers) == config.num_layers
        wanted = routing_laws.expected_experts(config, rows=24, exponent=exponent)
        assert routing.mean_distinct(layers) == pytest.approx(wanted, rel=0.12)
    same = with_routing(routed, config, "uniform")
    jax.tree.map(np.testing.assert_array_equal, same, params)


@pytest.mark.slow
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
