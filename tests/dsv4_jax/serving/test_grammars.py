"""Answers that follow a grammar: whole, and the same beside others, with drafts and preempted."""

import dataclasses
import functools
import gc
import json
import re
import weakref

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import Grammar
from dsv4_jax.serving.device.grammar_masks import GrammarKeeper
from dsv4_jax.serving.requests import compile_grammar
from dsv4_jax.serving.requests.grammars import Grammars
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.requests.text import load_tokenizer
from dsv4_jax.serving.schedule.scheduler import RowPlan
from helpers import taught
from helpers.random_schemas import Schemas
from helpers.released_tokenizer import released_tokenizer
from helpers.serving import CONFIG, SIZES, one_layer, run_to_end

pytestmark = pytest.mark.unoptimised

TOKENIZER = load_tokenizer(ds.SHIPPED_CHECKPOINT)  # bytes are tokens, 257 ends
END, VOCAB = 257, 260
PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["age", "kind", "tags"],
    "additionalProperties": False,
}
ASKED = [
    {"grammar": Grammar.json_schema(PERSON)},
    {"grammar": Grammar("regex", "(ab|cd){9,30}"), "temperature": 1.0, "seed": 3},
    {},
    {"grammar": Grammar.json_schema(PERSON), "temperature": 1.3, "seed": 5, "logprobs": 2},
    {"grammar": Grammar("lark", 'start: "x" <[65]> /[0-9]{2}/'), "presence_penalty": 1.0},
]


def follows(number, text):
    if number in (0, 3):
        found = json.loads(text)
        return (
            list(found) == ["age", "kind", "tags"]
            and 0 <= found["age"] <= 99
            and found["kind"] in ("cat", "dog")
            and len(found["tags"]) <= 3
        )
    return re.fullmatch({1: "(ab|cd){9,30}", 2: ".*", 4: "xA[0-9]{2}"}[number], text, re.S)


@functools.cache
def params():
    """Drawn, not taught, so that every number comes to its end."""
    return ds.init_params(taught.SMALL, jax.random.key(0))


def make_engine(**changes):
    """Of the program that `test_dspark.py` takes too."""
    return taught.make_small(model=params(), **changes)


def texts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, n).tolist() for n in (30, 5, 50, 17, 9)]


def submit(engine, number, **changes):
    asked = ASKED[number] | {"max_new_tokens": 40 if number == 2 else 500} | changes
    return engine.submit(texts()[number], **asked)


@pytest.fixture(scope="module")
def alone():
    engine = make_engine()
    numbers = range(len(ASKED))
    return [
        run_to_end(engine, submit(engine, number, speculate=False, salt="alone"))[0]
        for number in numbers
    ]


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_an_answer_follows_its_grammar_and_ends_with_it(alone, number):
    if number != 2:
        assert alone[number].finish_reason == "stop"
        assert alone[number].token_ids[-1] == taught.END
    assert follows(number, alone[number].text)


@pytest.mark.slow
def test_neighbours_drafts_preemption_and_forks_change_nothing(alone):
    """Drafts are what was drawn alone, or tokens that the grammar refuses."""
    engine = make_engine(overlap=False)  # the host gives the drafts
    engine.warmup()
    compiles = engine.metrics.compiles
    ids = [submit(engine, number) for number in range(len(ASKED))]
    copies = []
    for step in range(300):
        for request_id, one in zip(ids, alone, strict=True):
            request = engine.requests[request_id]
            if request.drafts:
                right = one.token_ids[request.num_drawn :][:3]
                request.drafts = right if step % 3 else [*right[:1], 0, 0][:3]
        if step in (2, 5):
            engine.preempt(ids[3 * (step % 2)])
        if step == 3:
            copies = [engine.fork(ids[1], seed=3), engine.fork(ids[0], seed=0)]
        engine.step()
        if not engine.num_unfinished:
            break
    assert [engine.completion(one) for one in ids] == alone
    assert [engine.completion(one).token_ids for one in copies] == [
        alone[1].token_ids,
        alone[0].token_ids,
    ]
    assert engine.metrics.accepted_tokens > 10
    assert engine.metrics.preempted > 0
    assert engine.metrics.compiles == compiles


def test_an_error_in_a_step_does_not_lose_the_place(alone, monkeypatch):
    engine = make_engine()
    request_id = submit(engine, 0)
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner.devices, "launch", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert run_to_end(engine, request_id) == [alone[0]]


REFUSED = {
    "no schema": (Grammar("json_schema", '{"type": "nothing"}'), "grammar must be a json_schema"),
    "no JSON": (Grammar("json_schema", "{"), "grammar must be a json_schema"),
    "no expression": (Grammar("regex", "(a"), "grammar must be a regex"),
    "no Lark": (Grammar("lark", "beginning: 'a'"), "grammar must be a lark"),
    "no text": (Grammar("regex", "[^\\s\\S]"), "grammar must be a regex: nothing fulfils it"),
    "no end": (Grammar("lark", "start: start"), "grammar must be a lark: nothing fulfils it"),
    "no way on": (Grammar("lark", 'start: "a" T\nT: "b" & "c"'), "a lark: nothing fulfils it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_grammar_is_refused_before_anything_is_queued(name):
    engine = make_engine()
    grammar, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        engine.submit([1], grammar=grammar)
    assert engine.num_unfinished == 0


def test_what_a_grammar_needs_is_said(monkeypatch):
    engine = make_engine()
    grammar = Grammar("regex", "a+")
    with pytest.raises(ValueError, match="stop_token_ids must hold an end token"):
        engine.submit([1], grammar=grammar, stop_token_ids=())
    with pytest.raises(ValueError, match="was built with grammars=False"):
        make_engine(grammars=False).submit([1], grammar=grammar)
    with pytest.raises(ValueError, match="where the engine has no tokenizer"):
        make_engine(tokenizer=None).submit([1], grammar=grammar)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"llguidance is not installed.*dsv4-jax\[serve\]"):
        make_engine().submit([1], grammar=grammar)
    with pytest.raises(ValueError, match="kind must be one of"):
        Grammar("gbnf", "root ::= x")
    with pytest.raises(ValueError, match="schema must be a JSON schema"):
        Grammar.json_schema({"const": float("nan")})
    with pytest.raises(ValueError, match="grammar must be left out here"):
        ds.make_sampling(1, ds.SamplingParams(grammar=grammar))


def test_masks_are_of_each_draft_s_place_and_the_next_step_s():
    """Against the expression itself: a token is allowed where some string goes on with it."""
    config, _ = one_layer(vocab_size=VOCAB, eos_token_ids=(END,))
    keeper = GrammarKeeper(Grammars(config, TOKENIZER), num_slots=4, width=4)
    sampling = ds.SamplingParams(grammar=Grammar("regex", "ab(c|d)e?"), max_new_tokens=9)
    request = Request(0, np.array([97, 98]), sampling, 0.0)
    request.slot, request.drafts = 2, [*b"abd"]

    def allowed(num_drafts):
        masks = keeper.masks_of([RowPlan(2, 1, num_drafts, True)], {2: request})
        assert masks.is_masked.tolist() == [False, False, True, False]
        bits = np.unpackbits(masks.bits[2].view(np.uint8), axis=1, bitorder="little")
        return [np.flatnonzero(row).tolist() for row in bits[: num_drafts + 1]]

    assert allowed(3) == [[97], [98], [99, 100], [101, END]]
    assert allowed(0) == [[97]]
    request.add(97, None)
    request.drafts = [98, 98, 99]
    assert allowed(1) == [[98], [99, 100]]
    assert allowed(2)[:2] == [[98], [99, 100]]
    for token in b"bc":
        request.add(token, None)
    request.drafts = [END, 97]
    assert allowed(2)[0] == [101, END]
    assert allowed(0) == [[101, END]]
    assert keeper.masks_of([RowPlan(2, 1, 0, False)], {2: request}) is None


def masks_of_first(vocab_size, end, tokenizer, expression, drafts=()):
    """The tokens that a grammar allows at each place, as a step takes its masks."""
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size, eos_token_ids=(end,))
    keeper = GrammarKeeper(Grammars(config, tokenizer), num_slots=2, width=len(drafts) + 1)
    sampling = ds.SamplingParams(grammar=Grammar("regex", expression), max_new_tokens=9)
    request = Request(0, np.array([1, 2]), sampling, 0.0)
    request.slot, request.drafts = 1, list(drafts)
    masks = keeper.masks_of([RowPlan(1, 1, len(drafts), True)], {1: request})
    assert masks.bits.shape == keeper.no_masks().bits.shape
    bits = np.unpackbits(masks.bits[1].view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


@pytest.mark.parametrize("vocab_size", [258, 287, 288, 289, 319, 320, 321, 352, 1024])
def test_masks_fit_vocabularies_around_multiples_of_32(vocab_size):
    allowed = masks_of_first(vocab_size, END, TOKENIZER, "a(b|c)", drafts=b"ab")
    assert allowed == [[97], [98, 99], [END]]


def test_masks_fit_the_vocabulary_of_the_released_models():
    ids = released_tokenizer().encode("true false", add_special_tokens=False).ids
    allowed = masks_of_first(129_280, 1, released_tokenizer(), "true false", drafts=ids)
    assert len(allowed) == len(ids) + 1
    assert all(token in row for token, row in zip(ids, allowed, strict=False))
    assert allowed[-1] == [1]


@pytest.mark.slow
def test_a_model_with_a_vocabulary_that_is_a_multiple_of_32_answers():
    config, params = one_layer(vocab_size=288, eos_token_ids=(END,))
    engine = ds.Engine(config, params, **(SIZES | {"tokenizer": TOKENIZER}))
    (done,) = run_to_end(engine, submit(engine, 0))
    assert done.finish_reason == "stop"
    assert follows(0, done.text)


def check_random_schemas(count):
    """Drawn with drafts and neighbours, at temperatures at which a number comes to its end."""
    rng = np.random.default_rng(count)
    schemas = [Schemas(rng).draw() for _ in range(count)]
    engine = make_engine()
    ids = [
        engine.submit(
            rng.integers(0, 256, 5).tolist(),
            grammar=Grammar.json_schema(schema),
            temperature=float(rng.choice([0.7, 1, 1.5])),
            seed=number,
            max_new_tokens=500,
        )
        for number, (schema, _) in enumerate(schemas)
    ]
    while engine.num_unfinished:
        engine.step()
    for request_id, (schema, fits) in zip(ids, schemas, strict=True):
        done = engine.completion(request_id)
        assert done.finish_reason == "stop", (schema, done)
        assert fits(json.loads(done.text)), (schema, done.text)


def test_answers_to_random_schemas_are_of_them():
    check_random_schemas(20)


@pytest.mark.slow
def test_answers_to_300_random_schemas_are_of_them():
    check_random_schemas(300)


ALWAYS_NEW = "[a-z]*a[a-z]{300}"
"""After each letter, llguidance notes more of where the last 300 may have begun."""

LONG = {"max_new_tokens": 90, "temperature": 5.0}


@pytest.mark.slow
def test_an_answer_that_makes_llguidance_note_too_much_fails_alone(monkeypatch):
    """Copies of one compiled grammar share its states, and fail together."""
    monkeypatch.setattr(compile_grammar, "MAX_LEXER_STATES", 120)
    engine = make_engine()
    kept = Grammar("regex", ALWAYS_NEW)
    for _ in range(2):
        failed = run_to_end(engine, engine.submit([7], grammar=kept, **LONG))[0]
        assert failed.finish_reason == "error"
        assert "too many states" in failed.error
        assert 10 < len(failed.token_ids) < 90
    short = {"max_new_tokens": 10, "salt": "beside"}
    free = {"max_new_tokens": 40, "stop_token_ids": (), "salt": "free"}
    (wanted,) = run_to_end(engine, engine.submit([9], **free))
    ids = [engine.submit([7], grammar=Grammar("regex", ALWAYS_NEW), **LONG)]
    free_id = engine.submit([9], **free)
    while engine.requests[ids[0]].finish_reason is None:
        ids.append(engine.submit([7], grammar=Grammar("regex", ALWAYS_NEW), **short))
        for _ in range(20):
            engine.step()
    ends = [one.finish_reason for one in run_to_end(engine, *ids)]
    assert ends[0] == "error"
    assert set(ends[1:]) == {"length"}
    assert run_to_end(engine, free_id) == [wanted]


def test_a_compiled_grammar_lives_as_long_as_its_object():
    engine = make_engine()
    grammars, one = engine.limits.grammars, Grammar("regex", "[a-c]{3}")
    grammars.check(one)
    before = grammars.compiled[id(one)]
    grammars.check(one)
    assert grammars.compiled == {id(one): before}
    other = Grammar("regex", "[a-c]{3}")
    grammars.check(other)
    assert grammars.compiled[id(other)] is not before
    del one, other, before
    assert not grammars.compiled


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["ends", "cancelled"])
def test_a_grammar_is_forgotten_with_its_requests_and_waits_for_no_collector(n, how):
    """A compiled one may hold a hundred megabytes."""
    engine = make_engine()
    gc.disable()
    try:
        grammar = Grammar("regex", "[ab]{9}")
        seen = weakref.ref(grammar)
        ids = engine.submit_many(texts()[1], n, grammar=grammar, max_new_tokens=40)
        del grammar
        for _ in range(60 if how == "ends" else 4):
            engine.step()
        for request_id in ids:
            engine.cancel(request_id)
            done = engine.completion(request_id)
            assert done.finish_reason == ("stop" if how == "ends" else "cancelled")
        assert seen() is None
        assert not engine.limits.grammars.compiled
    finally:
        gc.enable()
