"""Sizes of steps with prompts: those given, and one that fits a bound where they leave a gap."""

import dataclasses

import jax.numpy as jnp
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import sizing
from dsv4_jax.serving.options import DEFAULT_MAX_STEP_MS, EngineOptions
from dsv4_jax.serving.step_sizes import find_sizes
from helpers.simulated_device import FLASH


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((64, 256), (64, 256)),
        ((64, 256, 8192), (64, 256, 512, 8192)),
        ((8192,), (512, 8192)),
        ((2048,), (512, 2048)),
        ((384, 2048), (384, 2048)),
        ((64, 768, 8192), (64, 768, 8192)),
        ((1024, 8192), (512, 1024, 8192)),
        ((900,), (900,)),
        ((2**31 - 1,), (512, 2**31 - 1)),
    ],
)
def test_a_gap_is_filled_by_the_size_that_fits(given, sizes):
    assert sizing.with_fitting_size(given, FLASH, 0.08, data=1, least=64) == sizes
    assert sizing.with_fitting_size(given, FLASH, float("inf"), data=1, least=64) == given
    assert sizing.with_fitting_size(given, FLASH, 0.001, data=1, least=64) == given


def test_the_size_of_the_default_bound_is_a_whole_number_of_waves():
    added = sizing.with_fitting_size(
        (64, 256, 8192), FLASH, DEFAULT_MAX_STEP_MS / 1e3, data=1, least=64
    )
    assert added == (64, 256, 1536, 8192)


def test_what_leaves_less_than_half_to_prompts_is_not_added():
    assert sizing.with_fitting_size((8192,), FLASH, 0.08, data=1, least=1025) == (8192,)


def test_shards_read_more_tokens_of_the_same_experts():
    (one, _), (four, _) = (
        sizing.with_fitting_size(
            (8192,), dataclasses.replace(FLASH, experts=FLASH.experts / data), 0.08, data=data,
            least=64,
        )
        for data in (1, 4)
    )  # fmt: skip
    assert one < four <= 2 * one


def plan(config, **fields):
    shapes = ds.model.param_shapes(config, jnp.bfloat16, weights="stored")
    options = EngineOptions(max_requests=32, max_context_tokens=16_384, **fields)
    return sizing.plan_engine(config, options, params=shapes, has_tokenizer=False)


def test_engines_have_the_size_if_they_have_a_bound():
    config = ds.DSV4Config.flash().without_draft()
    config = dataclasses.replace(config, num_routed_experts=192)
    given = {"prefill_tokens": (256, 8192)}
    assert plan(config, **given).step_sizes.prompts == (256, 8192)  # a CPU
    bounded = plan(config, max_step_ms=80, **given)
    assert bounded.step_sizes.prompts == (256, 512, 8192)
    assert bounded.cost.experts == pytest.approx(FLASH.experts, rel=1e-3)
    assert plan(config, max_step_ms=80, decode_tokens=256, **given).step_sizes.prompts == (
        256,
        8192,
    )
    assert plan(ds.DSV4Config.tiny(), max_step_ms=80, **given).step_sizes.prompts == (256, 8192)


@pytest.mark.parametrize(
    ("fields", "on_gpu", "decoding", "is_plain"),
    [
        ({}, True, (1, 8, 32, 64), True),
        ({}, False, (64,), True),
        ({"decode_batch_sizes": (4, 16)}, True, (4, 16, 64), True),
        ({"decode_batch_sizes": (4, 64)}, False, (4, 64), True),
        ({"decode_batch_sizes": (64,)}, True, (64,), True),
        ({"draft_tokens": 5}, True, (6, 48, 192, 384), False),
        ({"draft_tokens": 5}, False, (64, 256, 384), False),
        ({"draft_tokens": 5, "decode_batch_sizes": (2, 64)}, True, (12, 384), False),
        ({"decode_tokens": 64}, True, (64, 256), False),
    ],
)
def test_sizes_of_decode_steps(fields, on_gpu, decoding, is_plain):
    sizes = find_sizes(EngineOptions(**fields), max_requests=64, on_gpu=on_gpu)
    assert (sizes.warmed_up().decoding, sizes.is_plain) == (decoding, is_plain)
    is_chosen = on_gpu and not fields.keys() & {"decode_batch_sizes", "decode_tokens"}
    assert sizes.decoding == (decoding[-1:] if is_chosen else decoding)
    assert sizes.prompts == ((64, 256, 384) if fields.get("draft_tokens") else (64, 256))
    assert sizes.all[-1] == max(sizes.prompts)


def test_of_few_slots_no_size_is_larger():
    sizes = find_sizes(EngineOptions(), max_requests=5, on_gpu=True)
    assert sizes.warmed_up().decoding == (1, 5)


def test_sizes_for_more_than_all_requests_are_refused():
    options = EngineOptions(decode_batch_sizes=[8, 65])
    with pytest.raises(ValueError, match=r"decode_batch_sizes must be at most 64, .*65"):
        find_sizes(options, max_requests=64, on_gpu=True)
