"""The engine with drafts: the same tokens as without, in fewer steps where drafts are right."""

import dataclasses

import numpy as np
import pytest

import dsv4_jax as ds
from helpers import slow
from helpers.serving import CONFIG, make_engine, params, prompt, run_to_end, same_tokens

pytestmark = pytest.mark.compiles_for_others


@pytest.mark.parametrize("temperature", slow.all_but([0.8], [0.0, 0.8]))
def test_speculation_changes_no_token(temperature):
    """In one program: with drafts and without, five prompts on four slots. Known bug B15."""
    rng = np.random.default_rng(1)
    texts = [prompt(rng, int(n)) for n in (1, 40, 77, 101, 130)]  # a block has 128
    engine = make_engine(debug=True)
    results = {}
    for speculate in (True, False):
        ids = [
            engine.submit(
                text, max_new_tokens=30, stop_token_ids=(), seed=i, temperature=temperature,
                speculate=speculate, salt=str(speculate),
            )
            for i, text in enumerate(texts)
        ]  # fmt: skip
        results[speculate] = run_to_end(engine, *ids)
        if speculate:
            drafted, accepted = engine.metrics.drafted_tokens, engine.metrics.accepted_tokens
            assert drafted > 100
    for one, other in zip(results[True], results[False], strict=True):
        same_tokens(one, other)
    assert engine.metrics.drafted_tokens == drafted
    assert engine.metrics.accepted_tokens == accepted


def test_a_draft_that_is_right_is_accepted():
    """Drafts replaced by the true continuation: four tokens a step, the same tokens.

    One step crosses a block boundary with its drafts: blocks are reserved for what is in flight.
    """
    rng = np.random.default_rng(2)
    text = prompt(rng, 101)
    engine = make_engine(overlap=False)  # the host gives the drafts
    wanted = {"max_new_tokens": 41, "stop_token_ids": ()}
    (plain,) = run_to_end(engine, engine.submit(text, speculate=False, **wanted))
    request_id = engine.submit(text, **wanted)
    request = engine.requests[request_id]
    steps = 0
    while request.finish_reason is None:
        request.drafts = plain.token_ids[request.num_drawn : request.num_drawn + 3]
        engine.step()
        steps += 1
    assert steps == 5 + 10  # 101 prompt tokens in chunks of 24, then 40 tokens by four
    assert engine.metrics.acceptance == 1.0
    same_tokens(engine.completion(request_id), plain)


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [1, 2, 4, 5, 6, 7, 8])
def test_any_number_of_drafts_changes_no_token(draft_tokens):
    """In one program each, sampled, on three slots; all that fits is drafted."""
    rng = np.random.default_rng(9)
    texts = [prompt(rng, int(n)) for n in rng.integers(1, 200, 5)]
    engine = make_engine(
        draft_tokens=draft_tokens, max_requests=3, prefill_tokens=(32,), decode_tokens=32
    )
    results = []
    for speculate in (True, False):
        ids = [
            engine.submit(
                text, max_new_tokens=40, stop_token_ids=(), seed=i, temperature=0.8,
                speculate=speculate, salt=str(speculate),
            )
            for i, text in enumerate(texts)
        ]  # fmt: skip
        results.append([done.token_ids for done in run_to_end(engine, *ids)])
    assert results[0] == results[1]
    assert engine.metrics.drafted_tokens > 50 * draft_tokens


def test_engines_that_cannot_draft_are_refused():
    with pytest.raises(ValueError, match=r"draft_tokens must be 0\.\.16, got 17"):
        make_engine(draft_tokens=17)
    with pytest.raises(ValueError, match=r"draft_tokens must be at most 8, .*, got 9"):
        make_engine(draft_tokens=9)
    with pytest.raises(ValueError, match=r"draft_cut=True needs draft_tokens of DSpark stages"):
        make_engine(draft_cut=True)
    without = dataclasses.replace(params(), mtp=None)
    with pytest.raises(ValueError, match=r"draft_tokens=2 needs a draft \(an MTP block or"):
        ds.Engine(CONFIG, without, draft_tokens=2)
