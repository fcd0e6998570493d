"""An engine with DSpark drafts on a GPU: its programs are compiled as they are when it serves."""

import dataclasses
import functools

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench.engram_reads import make_tables, reduced
from dsv4_jax.bench.weights import random_params
from dsv4_jax.config.first_layers import first_layers
from helpers.serving import byte_tokenizer, run_to_end

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TEXTS = ("def main():\n    ", "The for statement", "class Point:\n", "import os\n\nfor name in ")
SIZES = {"max_requests": 4, "max_context_tokens": 1024, "prefill_tokens": (24,)}


@functools.cache
def shipped():
    """The model that comes with the package, whose stages keep most of their drafts."""
    return ds.load_checkpoint(ds.SHIPPED_CHECKPOINT)


@functools.cache
def engine(steps_per_call, cut):
    config, params = shipped()
    return ds.Engine(
        config, params, tokenizer=byte_tokenizer(),
        draft_tokens=5, draft_cut=cut, steps_per_call=steps_per_call, **SIZES,
    )  # fmt: skip


def answers(steps_per_call=1, cut=False, *, speculates, temperature):
    """Of all texts at once; simple rows, so that `jit_serve_round` and `jit_serve_rounds` run."""
    one = engine(steps_per_call, cut)
    wanted = {"max_new_tokens": 150, "stop_token_ids": (), "temperature": temperature}
    ids = [
        one.submit(text, seed=seed, speculate=speculates, salt=str(speculates), **wanted)
        for seed, text in enumerate(TEXTS)
    ]
    return [each.token_ids for each in run_to_end(one, *ids)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("steps_per_call", "cut"), [(1, False), (1, True), (4, False), (4, True)])
def test_drafts_change_no_answer(temperature, steps_per_call, cut):
    without = answers(speculates=False, temperature=temperature)
    assert answers(steps_per_call, cut, speculates=True, temperature=temperature) == without
    assert engine(steps_per_call, cut).metrics.acceptance > 0.2


def first_of_v41(layers, experts, table_rows):
    """Layers of V4.1-Flash with its three stages, random weights as the release stores them."""
    config = ds.DSV4Config.v41_flash()
    seen = tuple(range(layers - config.dspark.num_stages, layers))
    config = dataclasses.replace(
        config, dspark=dataclasses.replace(config.dspark, target_layers=seen)
    )
    config = dataclasses.replace(first_layers(config, layers), num_routed_experts=experts)
    config = dataclasses.replace(config, engram=reduced(config.engram, table_rows))
    params = random_params(config, weights="stored")
    return config, dataclasses.replace(params, engram=make_tables(config, None))


def answers_of_v41(made, *, speculates, temperature, max_new_tokens=96):
    vocab_size = made.config.vocab_size
    prompts = [np.random.default_rng(n).integers(3, vocab_size, n).tolist() for n in (9, 24, 40)]
    ids = [
        made.submit(
            tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=(),
            logprobs=1,
            speculate=speculates,
            salt=str(speculates),
        )
        for seed, tokens in enumerate(prompts)
    ]
    said = run_to_end(made, *ids)
    return [(each.token_ids, [one.logprob for one in each.logprobs]) for each in said]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_v41_change_no_answer(temperature, engine_of_v41):
    """Random weights keep hardly any, so that nearly every round takes back what it wrote."""
    without = answers_of_v41(engine_of_v41, speculates=False, temperature=temperature)
    drafted = engine_of_v41.metrics.drafted_tokens
    found = answers_of_v41(engine_of_v41, speculates=True, temperature=temperature)
    assert engine_of_v41.metrics.drafted_tokens > drafted
    assert found == without


@pytest.fixture(scope="module")
def engine_of_v41():
    """Its layers 0 to 7 have two Engram tables, and sources and readers of entries."""
    return ds.Engine(*first_of_v41(8, 32, 2**12), draft_tokens=5, grammars=False, **SIZES)
