"""JSON schemas: each keyword is held, says nothing, or is refused by name; nothing is ignored."""

import json
import pathlib
import random
import re

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

import dsv4_jax as ds
from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.keywords import REFUSED, SAYS_NOTHING
from dsv4_jax.schemas.read_schema import HELD, SchemaError, read_schema
from dsv4_jax.schemas.text_formats import FORMATS
from dsv4_jax.serving import Grammar
from dsv4_jax.serving.requests.grammars import Grammars
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.random_schemas import RandomSchemas
from helpers.schema_facts import FACTS, FORMAT_FACTS, WRONG
from helpers.serving import one_layer

END, VOCAB = 257, 260


@pytest.fixture(scope="module")
def grammars():
    config, _ = one_layer(vocab_size=VOCAB, eos_token_ids=(END,))
    return Grammars(config, load_tokenizer(ds.SHIPPED_CHECKPOINT))


def taken(grammars, schema, *texts):
    start = grammars.start(Grammar.json_schema(schema))
    found = []
    for text in texts:
        matcher, ids = start.deep_copy(), list(text.encode())
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


def written(values):
    return [json.dumps(value, ensure_ascii=False) for value in values]


@pytest.mark.parametrize("keyword", FACTS)
def test_a_keyword_is_held(grammars, keyword):
    for schema, good, bad in FACTS[keyword]:
        valid = jsonschema.Draft202012Validator(schema).is_valid
        if keyword not in (
            "format",
            "minimum",
            "additionalItems",
            "items",
        ):  # of newer drafts alone
            assert [valid(one) for one in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
        assert dict(zip(written(good), taken(grammars, schema, *written(good)), strict=True)) == (
            dict.fromkeys(written(good), True)
        )
        assert dict(zip(written(bad), taken(grammars, schema, *written(bad)), strict=True)) == (
            dict.fromkeys(written(bad), False)
        )


def test_every_keyword_that_is_held_has_its_facts():
    assert set(FACTS) == HELD


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_keyword_that_cannot_be_held_is_refused_with_its_place(keyword):
    """Within other schemas too; false alone asks for nothing of those that are flags."""
    for value in (True, {}, [], 1, {"type": "string"}):
        with pytest.raises(SchemaError, match=rf"^#/properties/a~1b/items/{re.escape(keyword)} "):
            read_schema({"properties": {"a/b": {"items": {keyword: value}}}})
    if keyword not in ("uniqueItems", "nullable"):
        with pytest.raises(SchemaError, match=re.escape(keyword)):
            read_schema({keyword: False})


def test_keywords_of_no_draft_are_refused_and_annotations_are_not(grammars):
    for keyword in ("minLenght", "required_", "strict", "Type", ""):
        with pytest.raises(SchemaError, match=f"^#/{keyword} is no keyword"):
            read_schema({keyword: 1})
    told = {name: {} for name in SAYS_NOTHING} | {
        "x-order": 1,
        "uniqueItems": False,
        "nullable": False,
    }
    assert taken(
        grammars, {"$id": "https://example.org/a", "type": "null"} | told, "null", "1"
    ) == [
        True,
        False,
    ]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_said_with_its_place(text):
    with pytest.raises(SchemaError, match=re.escape(WRONG[text])):
        read_schema(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": []},
        {"enum": ["a"], "type": "null"},
        {"minimum": 3, "maximum": 2, "type": "integer"},
    ],
)  # fmt: skip
def test_a_schema_that_nothing_fulfils_is_refused_before_anything_is_drawn(grammars, schema):
    with pytest.raises(ValueError, match=r"nothing fulfils|Unsatisfiable"):
        grammars.check(Grammar.json_schema(schema))


def test_what_refers_to_itself_is_left_out_where_something_else_fulfils_the_schema(grammars):
    loop = {"a": {"$ref": "#/$defs/a"}}
    schema = {"type": "object", "properties": loop, "additionalProperties": False, "$defs": loop}
    assert taken(grammars, schema, "{}", '{"a":1}') == [True, False]
    assert grammars.start(Grammar.json_schema(schema)).try_consume_tokens([*b'{"']) == 1
    list_ = {
        "type": ["object", "null"],
        "properties": {"next": {"$ref": "#"}},
        "required": ["next"],
    }
    assert taken(grammars, list_, "null", '{"next":{"next":null}}', '{"next":1}') == [
        True,
        True,
        False,
    ]


def test_a_listed_name_is_not_spelled_otherwise(grammars):
    r"""As \u0061 it would be one that is not listed, with any value."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert taken(grammars, schema, '{"a":1}', '{"\\u0061":"x"}', '{"b":"x"}') == [True, False, True]


def test_integers_of_any_size_are_written_digit_for_digit(grammars):
    texts = [str(1234567890123456789 + step) for step in (-21, 0, 11)]
    for schema in (
        {"const": 1234567890123456789},
        {"enum": [1234567890123456789, "a"], "type": "integer", "title": "id"},
    ):
        assert taken(grammars, schema, *texts, '"a"')[:3] == [False, True, False]
    for value in (2**60, -(2**63), 1e300, 123456789.12345679):
        near = str(value).replace("6", "7").replace("300", "301")
        assert taken(grammars, {"const": value}, str(value), near) == [True, False]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_held(grammars, name):
    good, bad = FORMAT_FACTS[name]
    schema = {"type": "string", "format": name}
    assert taken(grammars, schema, *written(good)) == [True] * len(good)
    assert taken(grammars, schema, *written(bad)) == [False] * len(bad)


def test_the_table_in_the_documentation_is_the_code_s():
    """docs/serving.md, whose rows begin with the three words."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    rows = dict(re.findall(r"^\| (enforced|without effect|refused) \| (.*?) \|", page, re.M))
    told = {name: set(re.findall(r"`([^`]+)`", row)) for name, row in rows.items()}
    assert told == {
        "enforced": HELD,
        "without effect": SAYS_NOTHING | {"x-..."},
        "refused": REFUSED,
    }
    told = re.search(r"^Formats that are enforced: (.*?)\.$", page, re.M | re.S)
    assert set(re.findall(r"`([^`]+)`", told[1])) == set(FORMATS)


def draw_by_chance(grammars, start, rng):
    """An answer by tokens that a grammar allows, or None if it is long."""
    matcher, drawn = start.deep_copy(), []
    for _ in range(200):
        allowed = [int(one) for one in grammars.compiler.allowed(matcher)]
        assert allowed, (drawn, matcher.get_error())
        closing = [one for one in allowed if one == END or (one < 256 and one in b'"}],')]
        token = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
        if token == END:
            return bytes(drawn)
        assert matcher.consume_token(token)
        drawn.append(token)
    return None


def check_random_schemas(grammars, seeds):
    compared = 0
    for seed in seeds:
        schema = RandomSchemas(seed).schema()
        try:
            start = grammars.start(Grammar.json_schema(schema))
        except ValueError:
            continue
        rng = random.Random(seed)
        for _ in range(4):
            drawn = draw_by_chance(grammars, start, rng)
            try:
                value = json.loads(drawn or b"")
                jsonschema.Draft202012Validator(schema).validate(value)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
                continue  # a cut answer, half a character, or a circle that the validator follows
            compared += 1
    assert compared > 2 * len(seeds)


def test_answers_to_random_schemas_are_valid_and_end(grammars):
    """By jsonschema; that a grammar allows no token fails too."""
    check_random_schemas(grammars, range(150))


@pytest.mark.slow
def test_answers_to_5000_random_schemas_are_valid_and_end(grammars):
    check_random_schemas(grammars, range(1000, 6000))


def test_a_schema_of_many_optional_properties_is_held(grammars):
    names = {f"p{number}": {"type": "null"} for number in range(1500)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    assert taken(grammars, schema, "{}", '{"p7":null,"p1499":null}', '{"p7":1}') == [
        True,
        True,
        False,
    ]


ABOVE = {"type": "number", "exclusiveMinimum": 3}
NEAR = {"maximum": 3.27}


@pytest.mark.parametrize(
    "schema",
    [
        ABOVE | NEAR,
        ABOVE | {"exclusiveMaximum": 3.275},
        ABOVE | {"allOf": [NEAR]},
        {"allOf": [ABOVE, {"type": "number"} | NEAR]},
        ABOVE | {"anyOf": [NEAR, {"minimum": 9}]},
        {"type": "number", "allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": ABOVE}} | NEAR,
    ],
)
def test_a_whole_bound_that_is_excluded_is_no_answer(grammars, schema):
    """llguidance takes it where the other bound begins with the same digits."""
    texts = ("3", "3.0", "3.000000001", "3.1", "3.3")
    assert taken(grammars, schema, *texts) == [False, False, True, True, False]


def test_other_whole_bounds_that_are_excluded(grammars):
    below = {"type": "number", "minimum": -3.27, "exclusiveMaximum": -3}
    assert taken(grammars, below, "-3", "-3.0", "-3.1", "-3.27") == [False, False, True, True]
    positive = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.27}
    assert taken(grammars, positive, "0", "0.0", "0.000000001", "0.1") == [False, False, True, True]
    share = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    assert taken(grammars, share, "0", "0.9", "0.999", "1", "1.0") == [False, True, True] + 2 * [
        False
    ]
    whole = {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}
    assert taken(grammars, whole, "3", "4", "5", "6") == [False, True, True, False]
    for large in (10**6, 10**14, 10**15):
        schema = {"type": "number", "exclusiveMinimum": large}
        assert taken(grammars, schema, f"{large}", f"{large}.0", f"{2 * large}") == [
            False, False, True,
        ]  # fmt: skip


def test_one_form_is_read_again_as_itself():
    """What was read is a schema that llguidance reads without its own help for old spellings."""
    for facts in FACTS.values():
        for schema, _, _ in facts:
            read = read_schema(schema)
            again = read_schema(read.part(read.root))
            assert LLMatcher.validate_grammar("start: " + json_value(again)) == ""


def test_masks_allow_numbers_within_bounds_alone(grammars):
    """A sweep of integers and tenths around bounds, each a whole answer."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        low, high = sorted(rng.integers(-300, 300, 2).tolist())
        whole = taken(grammars, {"type": "integer", "minimum": low, "maximum": high},
                      *map(str, range(-310, 310)))  # fmt: skip
        assert whole == [low <= one <= high for one in range(-310, 310)]
