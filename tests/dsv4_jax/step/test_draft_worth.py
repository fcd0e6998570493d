"""Which drafts are worth their rows, at the sizes of Flash."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.step.draft_worth import LAYER_S, StepCost, least_survival

SPEC = DSparkConfig(
    block_size=5,
    markov_rank=256,
    noise_token_id=128_799,
    target_layers=(40, 41, 42),
    num_stages=3,
)


@pytest.fixture(scope="module")
def flash():
    """192 of 256 experts, as one H200 holds them."""
    config = dataclasses.replace(
        ds.DSV4Config.flash().without_draft(), num_routed_experts=192, dspark=SPEC
    )
    return StepCost.of(config, ds.model.param_shapes(config, jnp.bfloat16, weights="stored"))


def test_bytes_of_one_row_are_those_of_the_arithmetic(flash):
    """dspark.md section 14: 11.22 GB, and what the stages add."""
    stages_and_markov = 3 * 0.1374 + 0.050 + 2 * 0.066
    read = flash.fixed + flash.experts * flash.picks / flash.num_experts
    assert read / 1e9 == pytest.approx(11.22 + stages_and_markov, rel=0.02)
    halves = dataclasses.replace(flash, fixed=flash.fixed / 2, experts=flash.experts / 2)
    gaps = flash.num_layers * LAYER_S
    assert halves.seconds(1, 1) - gaps == pytest.approx((flash.seconds(1, 1) - gaps) / 2)


@pytest.mark.parametrize(
    ("requests", "measured"),
    [
        (1, (7.45, 7.85, 8.52, 9.05, 9.58)),
        (8, (13.63, 15.61, 17.20, 18.29, 19.30)),
        (64, (31.95, 35.08, 40.18, 47.44, 50.65)),
    ],
)
def test_rounds_take_what_an_h200_was_seen_to_take(flash, requests, measured):
    """Milliseconds of rounds that check one to five drafts, of docs/benchmarks/decode_steps.md."""
    rows = requests * np.arange(2, 7)
    found = [1e3 * flash.seconds(count, count) for count in rows.tolist()]
    np.testing.assert_allclose(found, measured, rtol=0.12)


def test_drafts_are_dearest_where_rows_still_find_experts_that_nobody_read(flash):
    least = {count: least_survival(flash, count, 5) for count in (1, 4, 32, 256)}
    assert 0.15 < least[1] < 0.3
    assert least[4] > least[1]
    assert least[32] < least[1] / 2
    assert least[256] > least[32]  # each row's products take time of their own


def test_a_model_whose_rows_pick_all_experts_checks_everything():
    sizes = {"fixed": 1e6, "experts": 1e6, "num_experts": 4, "picks": 4, "num_layers": 2}
    assert least_survival(StepCost(**sizes), 1, 5) == 0


def test_rows_that_are_padding_read_no_experts(flash):
    padded, full = flash.seconds(192, 384), flash.seconds(384, 384)
    assert flash.seconds(192, 192) < padded < full
