"""Forms of answers: JSON, schemas and calls of tools, as grammars and through the real clients."""

import contextlib
import functools
import json
from typing import Literal

import httpx
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from dsv4_jax.serve.constraints import Wanted, grammar_of
from dsv4_jax.serve.errors import ApiError
from helpers.clients import anthropic
from helpers.serve import (
    BYTES_ALONE,
    MODEL,
    SPECIAL,
    added_ids,
    ids_of,
)

TOKEN_IDS = {text: 256 + number for number, text in enumerate(SPECIAL)}
PLAIN = {"thinking": {"type": "disabled"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "s": {"type": "string", "enum": ["a", "b"]},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
}


def tool(parameters, name="weather", **changes):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | changes}


def call(text, name="weather"):
    return f'<｜DSML｜invoke name="{name}">\n{text}</｜DSML｜invoke>\n'


def block(*calls):
    return f"<｜DSML｜tool_calls>\n{''.join(calls)}</｜DSML｜tool_calls>"


def parameter(name, value, is_text=True):
    told = "true" if is_text else "false"
    return f'<｜DSML｜parameter name="{name}" string="{told}">{value}</｜DSML｜parameter>\n'


DEFINED = {
    "n": {"type": "array", "items": {"type": "integer"}, "maxItems": 1},
    "m": {"anyOf": [{"$ref": "#/$defs/m"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]},
}
CITY = parameter("city", "Bern</b>\nü")
GOOD = CITY + parameter("unit", "C")


@pytest.fixture(scope="module")
def grammars(engine):
    """Those of an engine, whose tokenizer llguidance has read."""
    return engine.limits.grammars


@pytest.fixture(scope="module")
def accepts(grammars, tokenizer):
    """Whether the whole text is an answer."""
    token_ids = added_ids(tokenizer)

    def accepts(wanted, text):
        matcher = grammars.start(grammar_of(wanted, token_ids))
        ids = ids_of(tokenizer, text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


CASES = {
    "a schema": (
        Wanted(False, schema=SCHEMA),
        ['{"n": 3, "s": "a"}', '{"n":3,"s":"b"}', '{\n  "n": 3,\n  "s": "a"\n}'],
        ['{"n": 10, "s": "a"}', '{"n": 3}', "", 'so {"n": 3, "s": "a"}', '{"n": 3, "s": "a"} so'],
    ),
    "reasoning first": (
        Wanted(True, schema={"type": "object"}),
        ['hm { "</think>{}', '</think>{"a": [1, null]}'],
        ["{}", "hm</think>", "hm</think>[]", "hm</think>so {}"],
    ),
    "a call that must come": (
        Wanted(False, tools=[tool(PARAMETERS), tool({"type": "object"}, "any")], must_call=True),
        [
            block(call(GOOD)),
            "\n\n" + block(call(GOOD + parameter("days", 3, False)), call("", "any")),
            block(call(GOOD + parameter("where", "[1, 2.5]", False))),
            block(call(parameter("x_y", "z") + parameter("q", '{"a": 1}', False), "any")),
        ],
        [
            "no",
            block(),
            block(call(CITY)),
            block(call(GOOD, "other")),
            block(call(parameter("x y", "z"), "any")),
            block(call(CITY + parameter("unit", "K"))),
            block(call(GOOD + parameter("days", "three", False))),
            block(call(GOOD + parameter("days", 3))),
            block(call(GOOD + parameter("where", "[1, 2, 3]", False))),
            block(call(GOOD)) + "more",
        ],
    ),
    "a strict tool that may be called": (
        Wanted(True, tools=[tool(PARAMETERS, strict=True)]),
        ["hm</think>No.", "hm</think>Yes: a < b.\n\n" + block(call(GOOD), call(GOOD))],
        ["No.", "hm</think>Yes.\n\n" + block(call(CITY))],
    ),
    "a strict schema that does not say which properties it has": (
        Wanted(False, schema={"properties": {"a": {"properties": {}}, "b": {}}}, is_strict=True),
        ['{"a": {}, "b": [1]}'],
        ['{"a": {}}', '{"a": {"c": 1}, "b": 1}', '{"a": {}, "b": 1, "c": 1}'],
    ),
    "a strict schema that does": (
        Wanted(
            False,
            schema={"type": "object", "properties": {"a": {}}, "required": []}
            | {"additionalProperties": {"type": "null"}},
            is_strict=True,
        ),
        ["{}", '{"a": 1}', '{"c": null}'],
        ['{"c": 1}'],
    ),
    "arguments that other schemas describe": (
        Wanted(
            False,
            tools=[
                tool(
                    {
                        "$defs": DEFINED,
                        "properties": {
                            "n": {"$ref": "#/$defs/n"},
                            "m": {"anyOf": [{"$ref": "#/$defs/m"}, {"type": "null"}]},
                            "t": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]},
                        },
                    },
                    strict=True,
                )
            ],
            must_call=True,
        ),
        [
            block(
                call(
                    parameter("n", "[1]", False)
                    + parameter("m", "null", False)
                    + parameter("t", "x")
                )
            ),
            block(
                call(
                    parameter("n", "[]", False)
                    + parameter("m", "[[2], []]", False)
                    + parameter("t", "[1]", False)
                )
            ),
        ],
        [
            block(call(parameter("n", "x") + parameter("m", "null", False) + parameter("t", "x"))),
            block(
                call(parameter("n", "[1]", False) + parameter("m", "null") + parameter("t", "x"))
            ),
            block(
                call(
                    parameter("n", "[1, 2]", False)
                    + parameter("m", "null", False)
                    + parameter("t", "x")
                )
            ),
            block(call(parameter("n", "[1]", False) + parameter("m", "null", False))),
        ],
    ),
    "one call at most": (
        Wanted(False, tools=[tool({})], calls_once=True),
        ["No.", block(call(""))],
        [block(call(""), call(""))],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_grammar_takes_what_fits_and_nothing_else(accepts, name):
    wanted, good, bad = CASES[name]
    assert [text for text in good if not accepts(wanted, text)] == []
    assert [text for text in bad if accepts(wanted, text)] == []


def test_tools_without_a_promise_need_no_grammar():
    assert grammar_of(Wanted(True), {}) is None
    assert grammar_of(Wanted(True, tools=[tool(PARAMETERS)]), {}) is None


def test_what_is_too_much_is_refused():
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for schema, told in (
        ({"enum": ["x" * 2**16]}, "at most 65536 characters"),
        (functools.reduce(lambda inner, _: {"items": inner}, range(80), {}), "at most 64 deep"),
    ):
        with pytest.raises(ApiError, match=told):
            grammar_of(Wanted(False, schema=schema), TOKEN_IDS)
    with pytest.raises(ApiError, match="deep"):
        grammar_of(Wanted(False, schema=deep), TOKEN_IDS)
    with pytest.raises(ApiError, match="the tokenizer has no </think>"):
        grammar_of(Wanted(True, schema={}), {})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from(["", "string", "a\n\"", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "enum", "const", "properties", "required"]), inner),
    max_leaves=8,
)  # fmt: skip


@BYTES_ALONE  # the tokenizer has no part in it
@settings(max_examples=150, deadline=None)
@given(schema=JSON, part=JSON, required=JSON)
def test_no_schema_is_a_500(grammars, schema, part, required):
    """Each is a grammar, or refused as the caller's fault."""
    parameters = {"type": "object", "properties": {"x": part}, "required": required}
    for wanted in (
        Wanted(False, schema={"type": "object"} if schema is None else schema),
        Wanted(False, tools=[tool(schema)], must_call=True),
        Wanted(False, tools=[tool(parameters)], must_call=True),
    ):
        with contextlib.suppress(ApiError, ValueError):
            grammars.check(grammar_of(wanted, TOKEN_IDS))


def test_every_grammar_of_a_request_compiles():
    for wanted, _, _ in CASES.values():
        grammar = grammar_of(wanted, TOKEN_IDS)
        assert LLMatcher.validate_grammar(grammar.text) == ""


HI = [{"role": "user", "content": "json, please"}]


def test_a_chat_that_answers_with_a_schema(ask):
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    done = ask.chat.completions.create(
        model=MODEL, messages=HI, response_format=format_, n=2, seed=1, extra_body=PLAIN
    )
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"n", "s"}


class Tag(pydantic.BaseModel):
    names: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


class Found(pydantic.BaseModel):
    """What the client makes of it is strict, and has definitions and alternatives."""

    first: Tag
    second: Tag | None
    code: str = pydantic.Field(max_length=3)


@pytest.mark.slow
def test_a_chat_that_answers_with_a_class_of_the_client_s(ask):
    for seed in range(3):
        done = ask.chat.completions.parse(
            model=MODEL, messages=HI, response_format=Found, seed=seed, extra_body=PLAIN
        )
        assert isinstance(done.choices[0].message.parsed, Found)


def test_a_response_that_answers_with_a_schema_repeats_it(ask):
    format_ = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    done = ask.responses.create(
        model=MODEL, input="json", text={"format": format_}, reasoning={"effort": "none"},
        temperature=0,
    )  # fmt: skip
    assert 0 <= json.loads(done.output_text)["n"] <= 9
    assert done.text.format.strict
    assert done.text.format.schema_["properties"] == SCHEMA["properties"]


def test_a_tool_that_must_be_called_is(ask):
    """Reasoning is left out by itself, since there is none before such a call."""
    parts = {"unit": {"enum": ["C", "F"]}, "hot": {"type": "boolean"}}
    schema = {"type": "object", "properties": parts, "required": ["unit", "hot"]}
    done = ask.chat.completions.create(
        model=MODEL, messages=HI, tools=[tool(schema), tool(schema, "other")], seed=2,
        tool_choice={"type": "function", "function": {"name": "other"}},
        parallel_tool_calls=False, temperature=2,
    )  # fmt: skip
    (choice,) = done.choices
    assert choice.finish_reason == "tool_calls"
    (one,) = choice.message.tool_calls
    found = json.loads(one.function.arguments)
    assert one.function.name == "other"
    assert found["unit"] in ("C", "F")
    assert type(found["hot"]) is bool


@pytest.mark.slow
def test_a_message_whose_tool_must_be_called(server):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as claude:
        done = claude.messages.create(
            model=MODEL, messages=HI, max_tokens=400,
            tools=[{"name": name, "input_schema": schema} for name in ("a", "b")],
            tool_choice={"type": "tool", "name": "b", "disable_parallel_tool_use": True},
        )  # fmt: skip
    (part,) = [part for part in done.content if part.type == "tool_use"]
    assert (part.name, part.input["n"] in (1, 2)) == ("b", True)
    assert done.stop_reason == "tool_use"


def _format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _strict(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


REFUSED = {
    "a schema that nothing fulfils": {"response_format": _format({"$ref": "#"})},
    "a schema that contradicts itself": {"response_format": _format({"enum": [1], "type": "null"})},
    "a keyword that cannot be held": {"response_format": _strict({"uniqueItems": True})},
    "a strict tool of such": {"tools": [tool({"type": "object", "not": {}}, strict=True)]},
    "json beside tools": {"tools": [tool({})], "response_format": {"type": "json_object"}},
    "a call after reasoning": {"tools": [tool({})], "tool_choice": "required",
                               "thinking": {"type": "enabled"}},
    "a call of nothing": {"tool_choice": "required"},
    "ignore_eos": {"response_format": {"type": "json_object"}, "ignore_eos": True},
    "strict that is no flag": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": SCHEMA, "strict": 1}}},
    "no schema": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "nothing"}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(server, name):
    body = {"model": MODEL, "messages": HI} | PLAIN | REFUSED[name]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
