"""Tools whose schemas are many, long or deep: strict ones are held, others never refused."""

import functools

import pytest

from dsv4_jax.serve.constraints import Wanted, grammar_of
from dsv4_jax.serve.errors import ApiError
from helpers.answers import PLAIN, Answers, D, block, call, closed, parameter, tool
from helpers.released_tokenizer import END, VOCAB, released_tokenizer_json


@pytest.fixture(scope="module")
def answers():
    return Answers(released_tokenizer_json(), VOCAB, END)


def described(num_chars):
    return {"type": "object", "properties": {"a": {"type": "null", "description": "x" * num_chars}}}


DEEP = {
    "type": "object",
    "properties": {"a": functools.reduce(lambda inner, _: {"items": inner}, range(80), {})},
}
LONG = {"type": "object", "properties": {"a": {"enum": ["x" * 2**16]}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema", [described(2**17), DEEP, LONG], ids=["described", "deep", "long"]
)
def test_a_tool_of_which_nothing_is_promised_is_never_too_much(answers, schema):
    text = call(parameter("a", "null", False))
    body = {"tools": [tool(schema, strict=False)]}
    assert answers.allows(body | {"tool_choice": "required"}, f"{text}</{D}tool_calls>")
    assert answers.allows(body | {"parallel_tool_calls": False, **PLAIN}, block(text))


def test_descriptions_do_not_count_and_strict_tools_come_first(answers):
    """60 tools of 2,000 characters of descriptions each; a strict one behind two long ones."""
    many = [tool(described(2000), f"g{number}") for number in range(60)]
    null = parameter("a", "null", False)
    assert answers.allows({"tools": many, **PLAIN}, block(call(null, name="g7")))
    long = [tool({"type": "object", "properties": {"a": {"enum": ["x" * 40_000, str(number)]}}},
                 f"g{number}", strict=False) for number in range(2)]  # fmt: skip
    strict = closed(s={"enum": ["y" * 30_000]})
    body = {"tools": [*long, tool(strict)], **PLAIN}
    assert answers.allows(body, block(call(parameter("s", "y" * 30_000))))
    assert not answers.allows(body, block(call(parameter("s", "y"))))
    with pytest.raises(
        ApiError, match=r"^tools\[2\], f, which is strict: schemas must have at mos"
    ):
        answers.read({"tools": [tool(strict, "a"), tool(strict, "b"), tool(strict)]})


def test_arguments_that_share_definitions_are_held(answers):
    """Each takes those alone that it refers to: all of them each time would be too long."""
    values = [[f"v{i}_{j}" for j in range(60)] for i in range(40)]
    shared = {f"D{i}": {"type": "array", "items": {"enum": one}} for i, one in enumerate(values)}
    listed = {f"a{i}": {"$ref": f"#/$defs/D{i}"} for i in range(40)}
    for strict in (True, False):
        body = {"tools": [tool(closed(**listed) | {"$defs": shared}, strict=strict)], **PLAIN}
        body["tool_choice"] = "required"
        written = [parameter(f"a{i}", f'["{one[-1]}"]', False) for i, one in enumerate(values)]
        end = f"</{D}tool_calls>"
        assert answers.allows(body, call(*written) + end)
        wrong = [*written[:-1], parameter("a39", '["v0_0"]', False)]
        assert not answers.allows(body, call(*wrong) + end)


def test_hundreds_of_tools_make_a_grammar_that_an_engine_takes(answers):
    """The parameters of as many as there is room for are held, those of the others are free."""
    names = {f"p{i}": {"type": "string", "pattern": f"^{i}"} for i in range(30)}
    tools = [tool({"type": "object", "properties": {f"q{n}": {}, **names}}, f"g{n}", strict=False)
             for n in range(300)]  # fmt: skip
    token_ids = {D: answers.tokenizer.token_to_id(D)}
    grammar = grammar_of(Wanted(False, tools=tools, must_call=True, is_open=True), token_ids)
    start = answers.grammars.start(grammar)

    def is_allowed(text):
        ids = answers.ids(text + f"</{D}tool_calls>")
        return start.deep_copy().try_consume_tokens(ids) == len(ids)

    wrong = parameter("p7", "no")
    assert not is_allowed(call(wrong, name="g0"))
    assert is_allowed(call(name="g0"))
    assert is_allowed(call(wrong, name="g299"))
    short = closed(**{name: {} for name in names}) | {"required": []}
    strict = [tool(short, f"g{n}") for n in range(190)]
    with pytest.raises(ApiError, match="all tools together must have fewer and simpler parameters"):
        grammar_of(Wanted(False, tools=strict), token_ids)


def test_a_thousand_tools_are_within_an_engine_s_limit():
    tools = [tool({"type": "object", "properties": {f"p{n}": {"const": n}, f"q{n}": {}}},
                  f"a_tool_of_a_usual_name_{n}", strict=False) for n in range(1024)]  # fmt: skip
    assert grammar_of(Wanted(False, tools=tools, must_call=True), {D: 128825}) is not None
    more = [tool({}, f"{n}" * 70, strict=False) for n in range(1000)]
    with pytest.raises(ApiError, match="tools must be fewer, or have shorter names"):
        grammar_of(Wanted(False, tools=more, must_call=True), {D: 128825})
