"""Which drafts are worth their rows, at the sizes of Flash."""

import dataclasses

import jax.numpy as jnp
import pytest

import dsv4_jax as ds
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.serving.draft_worth import StepCost, least_survival

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
    return StepCost.of(config, ds.model.param_shapes(config, jnp.bfloat16, weights="released"))


def test_bytes_of_a_step_are_those_of_the_arithmetic(flash):
    """dspark.md section 14: 11.22 GB of one row, 26.91 of six, and what the stages add."""
    stages_and_markov = 3 * 0.1374 + 0.050 + 2 * 0.066
    assert flash.at(1) / 1e9 == pytest.approx(11.22 + stages_and_markov, rel=0.02)
    assert (flash.at(6) - flash.at(1)) / 1e9 == pytest.approx(26.91 - 11.22, rel=0.01)


def test_one_request_checks_likely_drafts_and_many_check_nearly_all(flash):
    """dspark.md section 7: 0.35 to 0.4 at one request, far less once rows share their experts."""
    assert 0.3 < least_survival(flash, 1, 5) < 0.45
    assert least_survival(flash, 64, 5) < 0.1
    assert least_survival(flash, 8, 5) < least_survival(flash, 1, 5)


def test_beyond_what_products_take_no_draft_is_free(flash):
    """A thousand requests: each row is as much work as any other."""
    assert least_survival(flash, 1024, 5) > 0.5


def test_a_model_whose_rows_pick_all_experts_checks_everything():
    assert least_survival(StepCost(fixed=1e6, experts=1e6, num_experts=4, picks=4), 1, 5) == 0
