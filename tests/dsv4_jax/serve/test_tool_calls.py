"""Calls of tools and JSON on the released tokenizer: what may be drawn, and what clients get."""

import datetime
import enum
import json
import random
import uuid
from typing import Literal

import pydantic
import pytest

from dsv4_jax.serve.constraints import Wanted, grammar_of
from dsv4_jax.serve.dialects import MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError
from helpers import slow
from helpers.answers import (
    HI,
    PLAIN,
    Answers,
    D,
    Spelled,
    block,
    call,
    closed,
    format_of,
    parameter,
    tool,
)
from helpers.clients import openai
from helpers.released_tokenizer import END, VOCAB, released_tokenizer_json
from helpers.serve import EOS, SPECIAL, v4_tokenizer

TEXT = closed(s={"type": "string"})
GOOD = call(parameter("s", "x"))


def response_format(model):
    """What the client sends where a class is asked for."""
    from openai.lib._parsing._completions import type_to_response_format_param

    return type_to_response_format_param(model)


@pytest.fixture(scope="module")
def answers():
    return Answers(released_tokenizer_json(), VOCAB, END)


@pytest.fixture(scope="module")
def bytes_alone():
    """A vocabulary that is small enough to draw from by chance."""
    return Answers(v4_tokenizer().to_str(), 256 + len(SPECIAL), EOS)


THINKING = {
    "a strict tool": {"tools": [tool(TEXT)]},
    "one call at most": {"tools": [tool(TEXT, strict=False)], "parallel_tool_calls": False},
    "JSON": format_of(closed(a={"type": "null"})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THINKING)
def test_reasoning_holds_no_tags_of_calls(answers, name):
    """A parser takes calls from reasoning too; what follows `</think>` would come too late."""
    body = THINKING[name]
    end = '</think>{"a": null}' if name == "JSON" else f"</think>ok{block(GOOD)}"
    assert answers.allows(body, "hm", end)
    for inside in (block(call(name="bogus")), f"<{D}tool_calls>\n", f"a {D}", f"</{D}invoke>"):
        assert not answers.allows(body, "hm", inside, end)
        assert answers.allows(body, "hm", Spelled(inside + "</think>"), end)


def test_what_is_spelled_by_other_tokens_is_text_to_the_parser_too(answers):
    """The grammar and the parser agree on what is a tag."""
    body = {"tools": [tool(TEXT)]}
    for inside in (f"</{D}parameter>", f"</{D}invoke>", f"<{D}tool_calls>", "</think>", D):
        head, tail = f"</think>{block(GOOD)}".split(">x<")
        parts = ("hm", head + ">", Spelled(inside), "<" + tail)
        assert answers.allows(body, *parts)
        assert answers.calls(body, *parts) == [("f", json.dumps({"s": inside}, ensure_ascii=False))]
        assert not answers.allows(body, "hm", head + ">", f"</{D}", "<" + tail)


def test_a_value_of_json_holds_no_tags(answers):
    body = {"tools": [tool(closed(o={"type": "array", "items": {"type": "string"}}))], **PLAIN}
    told = json.dumps([f"close </{D}parameter> ok"], ensure_ascii=False)
    head, tail = block(call(parameter("o", "@", False))).split("@")
    assert not answers.allows(body, head + told + tail)
    assert answers.allows(body, head, Spelled(told), tail)
    assert [json.loads(one) for _, one in answers.calls(body, head, Spelled(told), tail)] == [
        {"o": json.loads(told)}
    ]


def test_one_call_at_most_is_one(answers):
    body = {"tools": [tool(TEXT)], "parallel_tool_calls": False}
    assert answers.allows(body, f"</think>{block(GOOD)}")
    assert not answers.allows(body, f"</think>{block(GOOD, GOOD)}")


OPENED = {
    "chat": (None, {"tools": [tool(TEXT)], "tool_choice": "required"}),
    "one function": (
        None,
        {
            "tools": [tool(TEXT), tool(TEXT, "g")],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "messages": (
        MESSAGES,
        {
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": TEXT}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f", "parameters": TEXT}],
            "tool_choice": "required",
        },
    ),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_block_that_the_prompt_has_opened_is_not_opened_again(answers, name):
    dialect, body = OPENED[name]
    given = {} if dialect is None else {"dialect": dialect}
    head = f"<{D}tool_calls>\n"
    prompt = answers.tokenizer.decode(answers.read(body, **given).prompt_ids)
    assert prompt.endswith(head)
    rest = block(GOOD).removeprefix(head)
    assert answers.allows(body, rest, **given)
    assert not answers.allows(body, head + rest, **given)
    assert not answers.allows(body, "\n\n" + head + rest, **given)
    assert not answers.allows(body, f"</{D}tool_calls>", **given)
    if dialect is None:
        assert answers.calls(body, rest) == [("f", '{"s": "x"}')]


def test_a_block_that_the_prompt_has_not_opened_is(answers):
    body = {"max_tokens": 9, "tools": [{"name": "f", "input_schema": TEXT}]}
    body["tool_choice"] = {"type": "any"}
    assert answers.allows(body, f"\n\n{block(GOOD)}", dialect=MESSAGES)
    rest = block(GOOD).removeprefix(f"<{D}tool_calls>\n")
    assert not answers.allows(body, rest, dialect=MESSAGES)


def test_an_answer_whose_beginning_is_given_has_no_form(answers):
    """It would begin in the middle; reasoning may be begun."""
    begun = {"role": "assistant", "content": "", "reasoning_content": "hm", "prefix": True}
    body = format_of({"type": "null"})
    assert answers.allows({"messages": [*HI, begun], **body}, ", so</think>null")
    text = {"role": "assistant", "content": "n", "prefix": True}
    for last, more in ((begun | {"content": "n"}, {}), (text, PLAIN)):
        with pytest.raises(ApiError, match=r"messages\[1\]: must not be continued where"):
            answers.read({"messages": [*HI, last], **body, **more})


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Part(pydantic.BaseModel):
    size: int
    unit: Literal["mm", "m"] | None


class Node(pydantic.BaseModel):
    value: int
    next: "Node | None"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


class Everything(pydantic.BaseModel):
    """What clients make of such classes has references, choices and limits."""

    color: Color
    maybe: Color | None
    either: Literal["a", "b"] | None
    number_or_text: int | str
    part: Part
    parts: list[Part] = pydantic.Field(max_length=2)
    node: Node
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    day: datetime.date
    key: uuid.UUID
    word: str = pydantic.Field(min_length=1, max_length=3, pattern="^[a-z]+$")
    share: float = pydantic.Field(gt=0, le=1)


GIVEN = {
    "color": "red",
    "maybe": None,
    "either": "b",
    "number_or_text": "7",
    "part": {"size": 1, "unit": "mm"},
    "parts": [{"size": 2, "unit": None}],
    "node": {"value": 1, "next": {"value": 2, "next": None}},
    "pet": {"kind": "dog", "name": "Rex"},
    "day": "2024-02-29",
    "key": "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
    "word": "abc",
    "share": 0.5,
}
WRONG = {
    "color": ["purple", None],
    "maybe": ["purple", 1],
    "either": ["c", ""],
    "number_or_text": [None, [1]],
    "part": [{"size": 1}, {"size": 1, "unit": "km"}, {"size": 1, "unit": None, "more": 1}],
    "parts": [[1], [GIVEN["part"]] * 3],
    "node": [{"value": 1}, {"value": 1, "next": {"value": "x", "next": None}}],
    "pet": [{"kind": "cow", "name": "x"}, {"kind": "cat", "name": "Tom"}],
    "day": ["2023-02-29", "today"],
    "key": ["2eb8aa08"],
    "word": ["", "abcd", "AB"],
    "share": [0, 1.5, "0.5"],
}


def arguments(given):
    return call(
        *(
            parameter(
                name,
                one if isinstance(one, str) else json.dumps(one, ensure_ascii=False),
                isinstance(one, str),
            )
            for name, one in given.items()
        ),
        name="Everything",
    )


def test_a_class_of_the_client_s_as_a_tool(answers):
    body = {"tools": [openai.pydantic_function_tool(Everything)], **PLAIN}
    assert answers.allows(body, block(arguments(GIVEN)))
    ((_, told),) = answers.calls(body, block(arguments(GIVEN)))
    assert json.loads(told) == GIVEN
    Everything.model_validate_json(told)
    for name, values in WRONG.items():
        for value in values:
            assert not answers.allows(body, block(arguments({**GIVEN, name: value}))), (name, value)
        less = {key: one for key, one in GIVEN.items() if key != name}
        assert not answers.allows(body, block(arguments(less))), name


def test_a_class_of_the_client_s_as_an_answer(answers):
    body = {"response_format": response_format(Everything), **PLAIN}
    assert answers.allows(body, json.dumps(GIVEN))
    for name, values in WRONG.items():
        for value in values:
            assert not answers.allows(body, json.dumps({**GIVEN, name: value})), (name, value)


def test_a_class_that_refers_to_itself(answers):
    for body in (
        {"tools": [openai.pydantic_function_tool(Node)], **PLAIN},
        {"response_format": response_format(Node), **PLAIN},
    ):
        inner = {"value": 2, "next": {"value": 3, "next": None}}
        told = parameter("value", 1, False) + parameter("next", json.dumps(inner), False)
        is_tool = "tools" in body
        good = (
            block(call(told, name="Node")) if is_tool else json.dumps({"value": 1, "next": inner})
        )
        assert answers.allows(body, good)
        assert not answers.allows(body, good.replace("3", '"x"'))


@pytest.mark.slow
@pytest.mark.parametrize("model", slow.all_but([Everything], [Everything, Node, Part]))
def test_what_is_drawn_by_chance_is_of_the_class(bytes_alone, model):
    """Through the parser of calls, as the client reads it."""
    body = {"tools": [openai.pydantic_function_tool(model)], "tool_choice": "required"}
    rng, found = random.Random(4), 0
    for _ in range(20):
        ids = bytes_alone.draw(body, rng)
        calls = () if ids is None else bytes_alone.message(body, ids)["tool_calls"]
        for one in calls:
            model.model_validate_json(one["function"]["arguments"])
            found += 1
    assert found >= 3


def test_what_a_schema_requires_and_does_not_list_comes(answers):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "c"]}
    body = {"tools": [tool(schema)], **PLAIN}
    for more in (parameter("c", "x"), parameter("c", "[1]", False)):
        assert answers.allows(body, block(call(parameter("a", "1"), more)))
    assert not answers.allows(body, block(call(parameter("a", "1"))))
    assert not answers.allows(body, block(call(parameter("a", "1"), parameter("d", "x"))))
    body = format_of(schema) | PLAIN
    assert answers.allows(body, '{"a": "1", "c": [1]}')
    assert not answers.allows(body, '{"a": "1"}')
    assert not answers.allows(body, '{"a": "1", "c": 1, "d": 1}')


def test_the_body_of_a_call_is_parameters(answers):
    """Whatever a tool's schema says of them."""
    for schema in ({"type": "object"}, {"type": "object", "properties": {}}, TEXT):
        for strict in (True, False):
            body = {"tools": [tool(schema, strict=strict)], "tool_choice": "required"}
            start = f'<{D}invoke name="f">\n'
            for value in ('"Haifa"\n', "{}\n", "Haifa\n"):
                rest = f"{start}{value}</{D}invoke>\n</{D}tool_calls>"
                assert not answers.allows(body, rest)


def test_further_parameters_are_of_their_schema(answers):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    schema["additionalProperties"] = {"type": ["integer", "string"], "maxLength": 2}
    body = {"tools": [tool(schema)], **PLAIN}
    first = parameter("a", "null", False)
    assert answers.allows(body, block(call(first)))
    more = parameter("b", "3", False) + parameter("c", "xy")
    assert answers.allows(body, block(call(first, more)))
    for wrong in (parameter("b", "xyz"), parameter("b", "1.5", False), parameter("a", "x")):
        assert not answers.allows(body, block(call(first, wrong)))


def test_a_tool_of_several_forms(answers):
    forms = [closed(a={"const": 1}), closed(b={"type": "string"}), {"$ref": "#/$defs/c"}]
    schema = {"type": "object", "anyOf": forms, "$defs": {"c": closed(c={"type": "null"})}}
    body = {"tools": [tool(schema)], **PLAIN}
    good = [parameter("a", 1, False), parameter("b", "x"), parameter("c", "null", False)]
    assert [answers.allows(body, block(call(one))) for one in good] == [True] * 3
    assert not answers.allows(body, block(call(*good[:2])))
    assert not answers.allows(body, block(call()))


def test_many_texts_are_one_choice(answers):
    """As programs write a union of literals."""
    body = {"tools": [tool(closed(a={"anyOf": [{"const": f"v{n}"} for n in range(300)]}))], **PLAIN}
    assert answers.allows(body, block(call(parameter("a", "v299"))))
    assert not answers.allows(body, block(call(parameter("a", "v300"))))


LOOSE = [
    (None, {}),
    ({}, {"b": 1}),
    ({"properties": {"a": {"type": "null"}}}, {"a": None}),
    ({"type": None, "properties": {"a": {"type": "null"}}}, {"a": None}),
    ({"type": ["object", "null"], "properties": {"a": {"type": "null"}}}, {"a": None}),
    ({"$ref": "#/$defs/t", "$defs": {"t": closed(a={"type": "null"})}}, {"a": None}),
    ({"anyOf": [closed(a={"type": "null"}), closed(b={"type": "null"})]}, {"b": None}),
]


@pytest.mark.parametrize(("schema", "given"), LOOSE)
@pytest.mark.parametrize("strict", [True, False])
def test_arguments_are_an_object_though_their_schema_does_not_say_so(
    answers, schema, given, strict
):
    one = tool(schema, strict=strict)
    body = {"tools": [one], "tool_choice": "required"}
    told = call(*(parameter(name, json.dumps(value), False) for name, value in given.items()))
    assert answers.allows(body, f"{told}</{D}tool_calls>")
    if schema not in (None, {}):
        assert not answers.allows(body, f"{call(parameter('a', 'x'))}</{D}tool_calls>")
    flat = {"type": "function", **one["function"]}
    answers.read({"input": "hi", "tools": [flat]}, RESPONSES)
    if schema is not None:
        answers.read({"max_tokens": 9, "tools": [{"name": "f", "input_schema": schema}]}, MESSAGES)


def test_an_integer_of_any_size_is_an_argument_digit_for_digit(answers):
    for part in ({"const": 1234567890123456789}, {"enum": [1, 1234567890123456789]}):
        body = {"tools": [tool(closed(n=part))], **PLAIN}
        for number in (1234567890123456788, 1234567890123456789, 1234567890123456768):
            text = block(call(parameter("n", number, False)))
            assert answers.allows(body, text) == (number == 1234567890123456789)
            assert answers.calls(body, text) == [("f", f'{{"n": {number}}}')]


NAMES = ["a b", 'a"b', "a\\b", "a\nb", "a\tb"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_calls_cannot_spell_is_refused(answers, name):
    """The parser reads a name as far as a space or quote and writes it into JSON as it is."""
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    with pytest.raises(ApiError, match="must have a name without spaces, quotes"):
        answers.read({"tools": [tool(schema)]})
    assert answers.read({"tools": [tool(schema, strict=False)]}).sampling.grammar is None
    free = {"tools": [tool({"type": "object"}, strict=False)], "tool_choice": "required"}
    rest = call(parameter(name, "x")) + f"</{D}tool_calls>"
    assert not answers.allows(free, rest)


@pytest.mark.parametrize("name", ["a<b", "a>b", "a'b", "é", "a/b", "a=b", "a.b", "", "x" * 70])
def test_a_name_of_other_characters_is_json_to_the_client(answers, name):
    body = {"tools": [tool(closed(**{name: {"type": "string"}}))], **PLAIN}
    text = block(call(parameter(name, "x")))
    assert answers.allows(body, text)
    assert [json.loads(one) for _, one in answers.calls(body, text)] == [{name: "x"}]


CANNOT = {
    '{"properties": {"a": {"not": {}}}}': "#/properties/a/not cannot be held",
    '{"properties": {"a": {"items": {"uniqueItems": true}}}}': "#/properties/a/items/uniqueItems",
    '{"properties": {"a": {"type": "string", "pattern": "(^a)"}}}': "#/properties/a/pattern must",
    '{"properties": {"a": {"type": "string", "pattern": "(?i)a"}}}': "must have no flags",
    '{"properties": {"a": {"enum": [[1234567890123456789]]}}}': "#/properties/a/enum must be",
    '{"patternProperties": {"a": {}}}': "#/patternProperties cannot be held of all arguments",
    '{"properties": {"a": {}}, "required": [], "maxProperties": 0}': "#/maxProperties cannot",
    '{"properties": {"a": false}}': "#/properties/a is required, and nothing fulfils it",
    '{"properties": {"a": {"$ref": "#"}}}': "nothing fulfils the schema",
    '{"properties": {"a": {"patternProperties": {"f.*": {}, "b.*": {"type": "null"}}}}}': (
        "#/properties/a cannot be held: patternProperty"
    ),
}


@pytest.mark.parametrize("text", CANNOT)
def test_what_strict_arguments_cannot_hold_is_refused_and_others_are_free(answers, text):
    schema = {"type": "object"} | json.loads(text)
    with pytest.raises(ApiError) as caught:
        answers.read({"tools": [tool(TEXT, "g"), tool(schema)]})
    assert caught.value.status == 400
    assert caught.value.message.startswith("tools[1], f, which is strict: ")
    assert CANNOT[text] in caught.value.message
    body = {"tools": [tool(schema, strict=False)]}
    assert answers.read(body).sampling.grammar is None
    rest = call() + f"</{D}tool_calls>"
    assert answers.allows(body | {"tool_choice": "required"}, rest)


def test_references_that_multiply_are_refused():
    laughs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = closed(a={"$ref": "#/$defs/d0"}) | {"$defs": laughs | {"d40": {"type": "string"}}}
    with pytest.raises(ApiError, match="choices"):
        grammar_of(Wanted(False, tools=[tool(schema)]), {D: 5})
    forms = {"type": "object", "anyOf": [{"$ref": "#"}, {"$ref": "#"}, TEXT]}
    with pytest.raises(ApiError, match="choices"):
        grammar_of(Wanted(False, tools=[tool(forms)]), {D: 5})
