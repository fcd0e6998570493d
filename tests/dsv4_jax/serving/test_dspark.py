"""The engine with DSpark drafts: answers are, to the bit, those without drafts."""

import numpy as np
import pytest

from helpers import slow, taught
from helpers.serving import prompt, run_to_end

pytestmark = [pytest.mark.compiles_for_others, pytest.mark.unoptimised]

SETTINGS = (
    {},
    {"temperature": 0.3},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "logprobs": 3},
    {"temperature": 0.3, "min_p": 0.01, "logit_bias": {7: 4.0, 90: -3.0}, "logprobs": 0},
    {"frequency_penalty": 0.6, "presence_penalty": 0.4, "logprobs": 2},
    {"temperature": 0.4, "frequency_penalty": -0.5},
    {"logit_bias": {3: 2.0}},
)
LENGTHS = (1, 40, 77, 101, 24, 25, 122)  # chunks are of 24; the last ones cross a block of 128
WANTED = {"max_new_tokens": 24, "stop_token_ids": ()}


def submit_all(engine, *, salt, speculates):
    """One request of each of the settings; which of them speculate, `speculates` says by number."""
    rng = np.random.default_rng(1)
    return [
        engine.submit(
            prompt(rng, length), seed=number, speculate=speculates(number), salt=salt,
            **WANTED, **settings,
        )
        for number, (length, settings) in enumerate(zip(LENGTHS, SETTINGS, strict=True))
    ]  # fmt: skip


def answers(engine, **asked):
    return run_to_end(engine, *submit_all(engine, **asked))


@pytest.fixture(scope="module")
def without():
    """What an engine of the same program gives that checks no draft, one request at a time."""
    engine, found = taught.make_small(overlap=False), []
    for number in range(len(LENGTHS)):
        ids = submit_all(engine, salt="alone", speculates=lambda _: False)
        for other in ids[:number] + ids[number + 1 :]:
            engine.cancel(other)
        found += run_to_end(engine, ids[number])
    assert engine.metrics.drafted_tokens == 0
    return found


@pytest.mark.parametrize("overlap", slow.all_but([True], [True, False]))
def test_drafts_change_no_answer(without, overlap):
    """Seven on four slots: greedy and sampled, with limits, biases, penalties and logprobs."""
    engine = taught.make_small(overlap=overlap, debug=not overlap)
    assert answers(engine, salt="drafts", speculates=lambda _: True) == without
    metrics = engine.metrics
    assert 0.1 < metrics.acceptance < 0.95
    assert list(metrics.accepted_at) == list("12345")
    kept = [metrics.accepted_at[depth] for depth in "12345"]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] > 0
    assert not engine.verify().problems


def test_rows_with_and_without_drafts_are_in_one_step(without):
    engine = taught.make_small()
    mixed = answers(engine, salt="mixed", speculates=lambda number: number % 2 == 0)
    assert mixed == without
    assert engine.metrics.accepted_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4])
def test_any_depth_changes_no_answer(draft_tokens):
    """Fewer drafts than the block has: the block is as wide, and the first ones are checked."""
    engine = taught.make_small(draft_tokens=draft_tokens)
    plain = answers(engine, salt="plain", speculates=lambda _: False)
    assert engine.metrics.drafted_tokens == 0
    assert answers(engine, salt="drafts", speculates=lambda _: True) == plain
    assert list(engine.metrics.drafted_at) == [str(n + 1) for n in range(draft_tokens)]
    assert engine.metrics.accepted_tokens > 10


@pytest.mark.slow
def test_greedy_tokens_are_those_of_an_engine_without_drafts():
    """Of another program, whose logits may differ in their last bits."""
    rng = np.random.default_rng(8)
    texts = [prompt(rng, length) for length in LENGTHS]
    found = []
    for draft_tokens in (0, 5):
        engine = taught.make_small(draft_tokens=draft_tokens, cache_format="f32")
        found.append([done.token_ids for done in engine.generate(texts, **WANTED)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_answers_that_end_or_begin_beside_others_change_nothing():
    """Fifty requests of random lengths on four slots, some greedy, some that stop by a token."""
    rng = np.random.default_rng(2)
    asked = [
        {
            "prompt": prompt(rng, int(rng.integers(1, 180))),
            "max_new_tokens": int(rng.integers(1, 60)),
            "temperature": float(rng.choice([0, 0.3, 1])),
            "seed": number,
            "stop_token_ids": tuple(rng.integers(0, 96, 3).tolist()),
        }
        for number in range(50)
    ]
    engine, found = taught.make_small(debug=True), []
    for speculate in (True, False):
        ids = [engine.submit(**one, speculate=speculate, salt=str(speculate)) for one in asked]
        found.append(run_to_end(engine, *ids))
        assert engine.metrics.used_blocks == 0
    assert found[0] == found[1]
    assert {done.finish_reason for done in found[0]} == {"length", "stop"}
