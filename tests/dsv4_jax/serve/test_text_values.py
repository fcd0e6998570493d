"""Texts of a schema that calls hold as they are, against the same texts in JSON."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.read_schema import SchemaError, read_schema
from dsv4_jax.serve.forms.text_values import ends_of, texts_of
from helpers.serve import EOS, SPECIAL, v4_tokenizer

PATTERNS = [
    "^a",
    "b$",
    "a|b",
    "^a|b$",
    "^(x|y)*$",
    "[0-9]{2}",
    "^$",
    "\\.",
    "^[^/]+/[^/]+$",
    "\\d",
    "^\\w+$",
    "^\\W$",
    "^\\s$",
    "\\S",
    "^.$",
    "[]a]",
    "[^]a]",
    "^[\\d-]+$",
    "^[\\w.]+@",
    "a\\$",
    "\\^a",
    "(a|b)c|d$",
    "^a\nb$",
    "[|]",
    "[)$]",
    "^(?:a|b)|c",
    "^\\|$",
    '"',
    "^\\\\$",
    "[[:alpha:]]",
    "^\\p{Lu}",
    "é",
    "^(?i:ab)$",
    "x*",
    "\\/",
    "^[/]$",
    "^[\\[\\]]$",
    "^",
    "$",
    "a{2,3}",
    "\\x41",
    "^\\n$",
]
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "ba",
    "c",
    "d",
    "ac",
    "xyx",
    "12",
    "1",
    "\u0663",
    "é",
    "É",
    "E",
    ".",
    "a/b",
    "/",
    "$",
    "a$",
    "^a",
    "|",
    "]",
    "[",
    ")",
    "\\",
    '"',
    "a\nb",
    "\n",
    "\t",
    " ",
    "\u00a0",
    "\u2028",
    "aa",
    "A",
    "aB",
    "_",
    "-",
    "1-2",
    "a@b",
]


@pytest.fixture(scope="module")
def vocabulary():
    text = v4_tokenizer().to_str()
    return LLTokenizer(text, n_vocab=256 + len(SPECIAL), eos_token=[EOS])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_of_the_same_texts_as_in_json(vocabulary, pattern):
    """llguidance's own reading of it, in JSON, against the expression of the text as it is."""
    schema = read_schema({"type": "string", "pattern": pattern, "maxLength": 9})
    (text,) = texts_of(schema.root, schema)

    def follow(lark):
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(matcher, whole):
        matcher, ids = matcher.deep_copy(), list(whole.encode())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    plain, quoted = (
        follow(f"start: T\nT: {ends_of(text, '')}"),
        follow(f"start: {json_value(schema)}"),
    )
    found = [takes(plain, f"{one}</") for one in TEXTS]
    assert found == [takes(quoted, json.dumps(one, ensure_ascii=False)) for one in TEXTS]
    assert any(found)


def test_texts_of_a_schema_are_those_of_all_that_it_refers_to():
    word = {"type": "string", "maxLength": 3}
    schema = read_schema(
        {
            "anyOf": [
                {"$ref": "#/$defs/loop"},
                {"allOf": [{"enum": ["abcd", "ab", 1]}, word]},
                {"enum": ["x", "yy"], "type": "string", "pattern": "^y"},
                {"type": "string", "minLength": 3, "maxLength": 2},
            ],
            "$defs": {"loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"const": "z"}]}},
        }
    )
    (text, *others) = texts_of(schema.root, schema)
    assert (set(text.values), others) == ({"z", "ab", "yy"}, [])
    nine = {"anyOf": [{"type": "string", "pattern": f"^{n}"} for n in range(9)]}
    both = read_schema({"allOf": [nine, nine]})
    with pytest.raises(SchemaError, match="at most 64 choices"):
        texts_of(both.root, both)


def test_a_choice_of_many_texts_is_one_list():
    """As programs write a union of literals."""
    many = [{"const": f"v{n}", "type": "string"} for n in range(300)]
    schema = read_schema({"anyOf": [*many, {"type": "string", "pattern": "^x"}, {"type": "null"}]})
    values, pattern = texts_of(schema.root, schema)
    assert values.values == tuple(f"v{n}" for n in range(300))
    assert pattern.patterns == ("^x",)
