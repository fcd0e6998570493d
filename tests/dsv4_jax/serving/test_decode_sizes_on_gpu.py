"""An engine on a GPU decodes in steps of several sizes, compiled as they are when it serves."""

import functools

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import Grammar
from helpers.serving import byte_tokenizer, run_to_end

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TEXTS = ("def main():\n    ", "The for statement", "class Point:\n", "import os\n\nfor name in ")
SIZES = {"max_context_tokens": 512, "prefill_tokens": (512,), "num_snapshots": 0}
ASKED = [
    {}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 2},
    {"grammar": Grammar("regex", "[a-z ]{60}"), "stop_token_ids": None}, {"frequency_penalty": 0.3},
]  # fmt: skip


@functools.cache
def engine(max_requests, *batch_sizes):
    """Of the model that comes with the package; sizes of its decode steps, if not the default."""
    config, params = ds.load_checkpoint(ds.SHIPPED_CHECKPOINT)
    one = ds.Engine(
        config, params, tokenizer=byte_tokenizer(),
        max_requests=max_requests, decode_batch_sizes=batch_sizes or None, draft_tokens=0, **SIZES,
    )  # fmt: skip
    one.warmup()
    return one


def answers(one, requests):
    """Tokens of so many requests at once, each with settings of its own, and their logprobs."""
    ids = []
    for seed in range(requests):
        text, asked = TEXTS[seed % len(TEXTS)], ASKED[seed % len(ASKED)]
        asked = {"max_new_tokens": 50, "stop_token_ids": (), "seed": seed} | asked
        ids.append(one.submit(text, salt=str(one.metrics.steps), **asked))
    return run_to_end(one, *ids)


@pytest.mark.parametrize("requests", [1, 6, 8, 16])
def test_answers_are_those_of_an_engine_for_so_many(requests, monkeypatch):
    """The default sizes are 1, 8 and all: each is the step of an engine that has room for it."""
    one, size = engine(16), next(fit for fit in (1, 8, 16) if fit >= requests)
    made, launch = set(), one.loop.runner.devices.launch

    def note(step_input, *more, **options):
        if options["is_plain"]:
            made.add(len(step_input.token_ids))
        return launch(step_input, *more, **options)

    monkeypatch.setattr(one.loop.runner.devices, "launch", note)
    compiled = one.metrics.compiles
    found = answers(one, requests)
    assert made == {size}
    assert one.metrics.compiles == compiled, "warm-up compiled them all"
    expected = answers(engine(size, size), requests)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
    assert not one.verify().problems


def test_who_comes_and_goes_is_fed_from_one_size_to_the_next():
    """Greedy answers of requests that end at different times, beside those of one size."""
    found, expected = [], []
    for one, taken in ((engine(16), found), (engine(16, 16), expected)):
        ids = [
            one.submit(TEXTS[n % 4] + str(n), max_new_tokens=5 + 9 * n, stop_token_ids=())
            for n in range(12)
        ]
        taken += [each.token_ids for each in run_to_end(one, *ids)]
    assert [len(each) for each in found] == [5 + 9 * n for n in range(12)]
    same = np.mean([np.array_equal(*pair) for pair in zip(found, expected, strict=True)])
    assert same >= 0.75, "sizes differ in their last bits alone"
