"""What calls take by arithmetic, beside what an H200 was seen to take."""

import dataclasses

import jax.numpy as jnp
import pytest

import dsv4_jax as ds
from dsv4_jax.step.call_cost import base_seconds, reach_seconds
from dsv4_jax.step.draft_worth import StepCost


@pytest.fixture(scope="module")
def flash():
    """192 of 256 experts, as one H200 holds them."""
    config = dataclasses.replace(ds.DSV4Config.flash().without_draft(), num_routed_experts=192)
    return StepCost.of(config, ds.model.param_shapes(config, jnp.bfloat16, weights="stored"))


@pytest.mark.parametrize(("tokens", "measured"), [(8192, 405), (16_384, 817), (32_768, 1481)])
def test_prompts_take_what_an_h200_was_seen_to_take(flash, tokens, measured):
    """Milliseconds of one call, of docs/benchmarks/prefill.md."""
    seconds = base_seconds(flash, tokens, tokens) + reach_seconds(flash, tokens**2 / 2)
    assert 1e3 * seconds == pytest.approx(measured, rel=0.12)


def test_a_longer_context_takes_longer(flash):
    """32,768 tokens take 1,785 ms in four calls of 8,192, of which each alone takes 405."""
    before = [8192 * (number + 0.5) for number in range(4)]
    seconds = sum(
        base_seconds(flash, 8192, 8192) + reach_seconds(flash, 8192 * each) for each in before
    )
    assert 1e3 * seconds == pytest.approx(1785, rel=0.05)


def test_padding_reads_no_experts_and_takes_less_than_tokens(flash):
    full, half = base_seconds(flash, 1024, 1024), base_seconds(flash, 512, 1024)
    assert base_seconds(flash, 512, 512) < half < full
    assert base_seconds(flash, 1, 1) < base_seconds(flash, 1, 64) + 1e-9
    assert base_seconds(flash, 64, 64) > 2 * base_seconds(flash, 1, 64)


def test_data_shards_share_experts_alone(flash):
    """4x1 on four H200 read four prompts of 32,768 tokens in 1.96 s, with 256 experts."""
    config = ds.DSV4Config.flash().without_draft()
    cost = StepCost.of(config, ds.model.param_shapes(config, jnp.bfloat16, weights="stored"))
    of_device = dataclasses.replace(cost, experts=cost.experts / 4)
    seconds = base_seconds(of_device, 4 * 32_768, 32_768)
    seconds += reach_seconds(of_device, 32_768**2 / 2)
    assert seconds == pytest.approx(1.96, rel=0.2)
