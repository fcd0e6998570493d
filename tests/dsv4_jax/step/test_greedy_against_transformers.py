"""A whole answer through prefill, cache and decode loop, against transformers' own decoding."""

import dataclasses

import numpy as np
import pytest

import dsv4_jax as ds
from helpers import oracle, tolerance

pytestmark = pytest.mark.unoptimised


def generate(case, config, **sizes):
    prompt = case.data["greedy/prompt"].tolist()
    expected = case.data["greedy/token_ids"].tolist()
    engine = ds.Engine(
        config,
        case.params,
        max_requests=2,
        max_context_tokens=len(prompt) + len(expected),
        cache_format="f32",
        **sizes,
    )
    (completion,) = engine.generate(
        [prompt], max_new_tokens=len(expected), temperature=0.0, stop_token_ids=()
    )
    return completion, expected


@pytest.mark.slow
@pytest.mark.parametrize("preset", oracle.PRESETS)
def test_a_hundred_greedy_tokens_agree(preset):
    case = oracle.load_case(preset)
    margin = np.min(case.data["greedy/margin"])
    assert margin > 10 * tolerance.INTERMEDIATE, "rounding alone could change a token"
    # A decode program of its own compiles for long: one model has it, the others run one for all.
    sizes = {} if preset == "tiny" else {"prefill_tokens": (16,), "decode_tokens": 16}
    completion, expected = generate(case, case.config, **sizes)
    assert len(expected) == 100
    assert len(set(expected)) > 10
    assert completion.token_ids == expected
    assert completion.finish_reason == "length"


@pytest.mark.slow
def test_a_window_one_token_short_is_noticed():
    case = oracle.load_case("kernel")
    short = dataclasses.replace(case.config, sliding_window=case.config.sliding_window - 1)
    completion, expected = generate(case, short)
    assert completion.token_ids != expected
