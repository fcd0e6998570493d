"""Grammars, stop texts and limits where a block of DSpark drafts crosses the place they change at.

The forms are those of the server: reasoning up to `</think>`, then strict JSON or calls of tools.
"""

import json
import re

import numpy as np
import pytest

from dsv4_jax.serve.constraints import Wanted, grammar_of
from helpers import taught
from helpers.serve import added_ids, v4_tokenizer
from helpers.serving import prompt, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.compiles_for_others]

TOKENIZER = v4_tokenizer()
BLOCK = taught.SMALL.dspark.block_size
IDS = added_ids(TOKENIZER)
THINK_END, MARK = IDS["</think>"], IDS["｜DSML｜"]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["a", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
FORMS = {
    "JSON": (Wanted(False, schema=SCHEMA), {}),
    "JSON after reasoning": (Wanted(True, schema=SCHEMA), {THINK_END: 3.0}),
    "a call": (Wanted(False, tools=[TOOL], must_call=True), {}),
    "a call after reasoning": (Wanted(True, tools=[TOOL], must_call=True), {THINK_END: 3.0}),
    "text and a call": (Wanted(False, tools=[TOOL]), {ord("<"): 6.0, ord("/"): 3.0, MARK: 9.0}),
}


def follows(name, text):
    """Whether a whole answer is of that form."""
    if "JSON" in name:
        found = json.loads(text.rpartition("</think>")[2])
        return list(found) == ["n", "s"] and 0 <= found["n"] <= 9 and found["s"] in ("a", "b")
    value = '<｜DSML｜parameter name="n" string="false">[0-9]</｜DSML｜parameter>\n'
    other = '<｜DSML｜parameter name="s" string="true">[ab]</｜DSML｜parameter>\n'
    call = f'<｜DSML｜invoke name="f">\n{value}{other}</｜DSML｜invoke>\n'
    calls = f"<｜DSML｜tool_calls>\n({call})+</｜DSML｜tool_calls>"
    times = "?" if name == "text and a call" else ""
    return re.fullmatch(f"(?s:.*)({calls}){times}", text)


def submit(engine, name, seed, **changes):
    wanted, bias = FORMS[name]
    asked = {"max_new_tokens": 400, "temperature": 1.0, "logit_bias": bias, "seed": seed}
    text = prompt(np.random.default_rng(seed), 9)
    return engine.submit(text, grammar=grammar_of(wanted, IDS), **(asked | changes))


@pytest.fixture(scope="module")
def engine():
    """The host gives drafts where a test wants others than the device's."""
    return taught.make_small(overlap=False)


@pytest.fixture(scope="module")
def plain(engine):
    """By form, a seed and its answer without drafts, whose reasoning is longer than a block."""
    found = {}
    for name in FORMS:
        for seed in range(40):
            request_id = submit(engine, name, seed, speculate=False, salt="plain")
            (done,) = run_to_end(engine, request_id)
            ids = done.token_ids
            long = "reasoning" not in name or (
                THINK_END in ids and ids.index(THINK_END) > BLOCK and len(ids) < 300
            )
            if done.finish_reason == "stop" and long:
                found[name] = seed, done
                break
    assert engine.metrics.drafted_tokens == 0
    return found


@pytest.mark.parametrize("name", FORMS)
def test_own_drafts_change_no_answer_of_that_form(engine, plain, name):
    seed, expected = plain[name]
    assert follows(name, expected.text), expected.text
    (done,) = run_to_end(engine, submit(engine, name, seed))
    assert done == expected


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("phase", range(3))
def test_right_and_wrong_drafts_change_no_answer(engine, plain, name, phase):
    """Right up to some place, then tokens that may be forbidden; blocks begin anywhere."""
    seed, expected = plain[name]
    rng = np.random.default_rng(phase)
    request = engine.requests[submit(engine, name, seed)]
    before = engine.metrics.accepted_tokens
    while request.finish_reason is None:
        if request.num_drawn:
            right = expected.token_ids[request.num_drawn :][:BLOCK]
            wrong = rng.integers(0, taught.SMALL.vocab_size, BLOCK).tolist()
            place = int(rng.integers(0, BLOCK + 1))
            request.drafts = (right[:place] + wrong[place:])[: len(right)]
        engine.step()
    assert engine.completion(request.request_id) == expected
    assert engine.metrics.accepted_tokens - before > len(expected.token_ids) // 3


@pytest.mark.parametrize("after", ["right", "wrong"])
@pytest.mark.parametrize("place", range(1, BLOCK + 2))
@pytest.mark.parametrize("name", ["JSON after reasoning", "a call after reasoning"])
def test_reasoning_ends_at_any_place_of_a_block(engine, plain, name, place, after):
    """As a draft, or as the token drawn after them all; the place after it is under the grammar.

    What follows it are the right tokens, or ones that reasoning may go on with.
    """
    seed, expected = plain[name]
    ids = expected.token_ids
    number = ids.index(THINK_END)
    request = engine.requests[submit(engine, name, seed)]
    while request.num_drawn < number + 1 - place or not request.num_drawn:
        request.drafts = []
        engine.step()
    start = request.num_drawn
    assert start + place - 1 == number
    drafts = ids[start:][:BLOCK]
    if after == "wrong":
        drafts[place:] = [ord("z")] * len(drafts[place:])
    request.drafts = drafts
    engine.step()
    kept = BLOCK if after == "right" else min(place, BLOCK)
    assert request.num_drawn - start == kept + 1
    while request.finish_reason is None:
        request.drafts = ids[request.num_drawn :][:BLOCK]
        engine.step()
    assert engine.completion(request.request_id) == expected


@pytest.mark.parametrize("place", range(1, BLOCK + 2))
def test_a_stop_text_may_end_at_any_place_of_a_block(engine, place):
    rng = np.random.default_rng(place)
    text, wanted = prompt(rng, 20), {"max_new_tokens": 30, "stop_token_ids": (), "temperature": 1.0}
    bias = {letter: 6.0 for letter in b"abcdefghijklmnopqrstuvwxyz"}  # one character, one token
    wanted["logit_bias"] = bias | {mark: -100.0 for mark in IDS.values()}
    (free,) = run_to_end(engine, engine.submit(text, speculate=False, salt="free", **wanted))
    number = 10 + place
    stop = TOKENIZER.decode(free.token_ids[number - 2 : number + 1])
    wanted["stop_texts"] = (stop,)
    (expected,) = run_to_end(engine, engine.submit(text, speculate=False, salt="stop", **wanted))
    request = engine.requests[engine.submit(text, salt="drafts", **wanted)]
    while request.num_drawn < len(expected.token_ids) - place or not request.num_drawn:
        request.drafts = []
        engine.step()
    request.drafts = free.token_ids[request.num_drawn :][:BLOCK]
    engine.step()
    assert request.finish_reason == "stop"
    assert engine.completion(request.request_id) == expected
    assert stop not in expected.text


def test_forms_beside_each_other_with_steps_in_flight(plain):
    """Own drafts, and a row without a grammar, whose drafts no mask touches."""
    engine = taught.make_small()
    free = {"max_new_tokens": 60, "stop_token_ids": ()}
    text = prompt(np.random.default_rng(0), 30)
    (expected,) = run_to_end(engine, engine.submit(text, speculate=False, salt="plain", **free))
    ids = [submit(engine, name, seed) for name, (seed, _) in plain.items()]
    other = engine.submit(text, salt="drafts", **free)
    assert run_to_end(engine, *ids) == [done for _, done in plain.values()]
    assert run_to_end(engine, other) == [expected]
    assert engine.metrics.accepted_tokens > 10
