"""Schemas of answers that are not strict: what can be held is held, and the rest is left out."""

import datetime
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Literal

import pydantic
import pytest

from dsv4_jax.schemas.keywords import REFUSED
from dsv4_jax.schemas.read_schema import SchemaError, read_schema
from dsv4_jax.serve.constraints import Wanted, grammar_of
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError
from helpers.answers import PLAIN, Answers, closed, format_of
from helpers.random_schemas import RandomSchemas
from helpers.schema_facts import FACTS
from helpers.serve import EOS, SPECIAL, v4_tokenizer


@pytest.fixture(scope="module")
def answers():
    return Answers(v4_tokenizer().to_str(), 256 + len(SPECIAL), EOS)


def advice(schema):
    named = {"name": "x", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}, **PLAIN}


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Usual(pydantic.BaseModel):
    """What pydantic writes of it has formats, sets and choices that no grammar holds."""

    tags: set[str]
    by_color: dict[Color, int]
    by_word: dict[Annotated[str, pydantic.Field(min_length=2)], int]
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    file: pathlib.Path
    secret: pydantic.SecretStr
    key: pydantic.UUID4
    net: ipaddress.IPv4Network
    word: Annotated[str, pydantic.Field(pattern=r"\bfoo\b")] = "foo"
    day: datetime.date


GIVEN = {
    "tags": ["a", "b"],
    "by_color": {"red": 1},
    "by_word": {"ab": 1},
    "pet": {"kind": "dog", "name": "Rex"},
    "file": "/etc/hosts",
    "secret": "x",
    "key": str(uuid.UUID(int=7, version=4)),
    "net": "10.0.0.0/8",
    "day": "2024-02-29",
}
WRONG = {
    "tags": "a",
    "by_color": {"green": 1},
    "by_word": {"a": 1},
    "pet": {"kind": "cow"},
    "file": 1,
    "day": "2023-02-29",
}


def test_a_class_is_held_but_for_what_cannot_be(answers):
    body, left_out = advice(Usual.model_json_schema()), []
    answers._conversations.read(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}, CHAT, left_out
    )
    assert [one.partition(" #/properties/")[2] for one in left_out] == [
        "tags/uniqueItems", "file/format", "secret/format", "key/format", "net/format",
        "word/pattern", "pet/oneOf",
    ]  # fmt: skip
    assert answers.allows(body, json.dumps(GIVEN))
    for name, value in WRONG.items():
        assert not answers.allows(body, json.dumps({**GIVEN, name: value})), name
    less = {name: one for name, one in GIVEN.items() if name != "day"}
    assert not answers.allows(body, json.dumps(less))


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES], ids=lambda one: one.name)
@pytest.mark.parametrize("strict", [False, None, True])
def test_what_is_promised_is_refused_and_what_is_not_is_left_out(answers, dialect, strict):
    schema = closed(a={"type": "array", "uniqueItems": True, "items": {"type": "integer"}})
    named = {"name": "x", "schema": schema, "strict": strict}
    if dialect is CHAT:
        body = advice(schema) | {"response_format": {"type": "json_schema", "json_schema": named}}
    elif dialect is RESPONSES:
        body = {"input": "hi", "text": {"format": {"type": "json_schema", **named}}}
        body["reasoning"] = {"effort": "none"}
    else:
        schema["additionalProperties"] = False
        format_ = {"type": "json_schema", "schema": schema}
        body = {"max_tokens": 9, "output_config": {"format": format_}, **PLAIN}
    if strict or dialect is MESSAGES:
        with pytest.raises(ApiError, match="#/properties/a/uniqueItems cannot be held"):
            answers.read(body, dialect)
        return
    assert answers.allows(body, '{"a": [1, 1]}', dialect=dialect)
    assert not answers.allows(body, '{"a": ["x"]}', dialect=dialect)


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_keyword_that_is_left_out_takes_nothing_else_with_it(answers, keyword):
    schema = closed(a={"type": "integer", "maximum": 3, keyword: {}})
    grammar = grammar_of(Wanted(False, schema=schema, is_advisory=True), {}, places := [])
    assert places == [f"#/properties/a/{keyword}"]
    start = answers.grammars.start(grammar)
    for text, is_right in (('{"a": 3}', True), ('{"a": 4}', False), ("{}", False)):
        matcher, ids = start.deep_copy(), answers.ids(text)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == is_right


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"properties": {"\x01": {}}, "additionalProperties": False}, {"b": 1}),
        ({"patternProperties": {"(?!a)": {}}, "additionalProperties": False}, {"b": 1}),
        ({"patternProperties": {"f.*": {}, "b.*": {"type": "null"}}, "type": "object"}, {"b": 1}),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}, "type": "object"}, {"b": 1}),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1.5),
        ({"$ref": "https://example.org/x", "type": "object"}, {}),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}, {"a": 1}),
        ({"items": [{"type": "integer"}, {"$id": "x"}], "type": "array"}, [1, 2]),
        ({"minProperties": 3, "type": "object"}, {}),
        ({"items": {"enum": [1234567890123456789]}, "type": "array"}, [1234567890123456788]),
        ({"type": "object", "minimum": -3.4028234663852886e38}, {}),
    ],
)  # fmt: skip
def test_what_is_left_out_allows_more_and_nothing_less(answers, schema, good):
    with pytest.raises((ApiError, ValueError)):
        answers.grammars.check(grammar_of(Wanted(False, schema=schema), {}))
    grammar = grammar_of(Wanted(False, schema=schema, is_advisory=True), {}, left_out := [])
    assert left_out
    matcher, ids = answers.grammars.start(grammar), answers.ids(json.dumps(good))
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_what_can_be_held_is_the_same_grammar(answers):
    """Of facts and of random schemas."""
    random_ones = [RandomSchemas(seed).schema() for seed in range(100)]
    for schema in [one for facts in FACTS.values() for one, _, _ in facts] + random_ones:
        wanted = Wanted(False, schema=schema)
        try:
            advised = grammar_of(wanted._replace(is_advisory=True), {}, left_out := [])
            answers.grammars.check(advised)
        except (ApiError, ValueError) as error:
            assert re.search("nothing fulfils|Unsatisfiable", str(error))  # noqa: PT017
        else:
            if not left_out:
                assert advised == grammar_of(wanted, {})


@pytest.mark.parametrize(
    "schema",
    [{"type": "null", "$ref": "#"}, {"enum": [1], "type": "null"}, {"enum": ["x" * 2**16]}],
    ids=["endless", "contradiction", "long"],
)
def test_what_nothing_fulfils_or_is_too_long_is_refused_as_if_it_were_strict(answers, schema):
    with pytest.raises((ApiError, ValueError), match=r"nothing fulfils|Unsatisf|at most 65536"):
        answers.grammars.check(answers.read(advice(schema)).sampling.grammar)


def test_a_part_that_is_no_schema_is_left_out():
    for text in ('{"properties": {"a": 1}}', '{"type": "x"}', '{"anyOf": []}', '{"required": 1}'):
        with pytest.raises(SchemaError):
            read_schema(json.loads(text))
        assert read_schema(json.loads(text), left_out=(places := [])) is not None
        assert len(places) == 1


def test_an_answer_of_a_strict_schema_is_not_advised(answers):
    with pytest.raises(ApiError, match="#/properties/a/not cannot be held"):
        answers.read(format_of(closed(a={"not": {}})))
