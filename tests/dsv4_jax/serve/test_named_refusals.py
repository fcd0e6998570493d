"""What is refused is named: the field that is wrong, or the place in the JSON."""

import itertools
import re

import httpx
import pytest

from dsv4_jax.serve.body import parse_object
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.reading import DIALECTS, refusal_of
from helpers import slow
from helpers.mutated_requests import CONVERSATIONS, FUNCTION, HI, OTHERS, mutations
from helpers.offline import Offline
from helpers.serve import BYTES_ALONE, MODEL, script

OFF = Offline()


@pytest.mark.parametrize(("path", "body"), CONVERSATIONS)
def test_what_is_mutated_is_right(path, body):
    OFF.read(body, _dialect(path))


@pytest.mark.parametrize("step", slow.all_but([61], [1, 61]))
def test_every_refusal_of_a_conversation_names_its_field(step):
    """The error says where, and the place is in the field that was changed.

    Of so many wrong bodies one is tried.
    """
    numbers, num_refused = itertools.count(), 0
    for path, body in CONVERSATIONS:
        for place, told, make in mutations(body):
            error = None if next(numbers) % step else _refusal(path, make())
            if error is None:
                continue
            num_refused += 1
            assert error.param, (path, place, told, error.message)
            assert error.param in error.message, error.message  # all that Anthropic's clients get
            assert _roots(place) & _roots(_steps(error.param)), (place, told, error.message)
    assert num_refused > 25_000 / step


def _refusal(path, body):
    try:
        OFF.read(body, _dialect(path))
    except ApiError as error:
        return error
    return None


TOGETHER = [
    {"messages", "tools"}, {"input", "tools"}, {"tools", "tool_choice"},
    {"reasoning", "tool_choice"}, {"thinking", "tool_choice"}, {"thinking", "messages"},
    {"stream", "stream_options"}, {"logprobs", "top_logprobs"}, {"input", "instructions"},
]  # fmt: skip
"""Fields of which one is right or wrong beside the other."""


def _roots(path):
    root = path[0]
    return {root}.union(*(pair for pair in TOGETHER if root in pair))


def _steps(param):
    return re.split(r"[.\[]", param)


def _dialect(path):
    return DIALECTS.get(path, MESSAGES)  # a count is one of messages


@pytest.fixture(scope="module")
def client(engine, server):
    with pytest.MonkeyPatch.context() as patch, httpx.Client(base_url=server.url) as client:
        script(patch, engine, "ok")
        yield client


@BYTES_ALONE
@pytest.mark.parametrize("step", slow.all_but([5], [1, 5]))
def test_every_refusal_of_the_other_endpoints_names_its_field(client, step):
    numbers, num_refused = itertools.count(), 0
    for path, body in OTHERS:
        for place, told, make in mutations(body):
            if next(numbers) % step:
                continue
            answer = client.post(path, json={"model": MODEL} | make())
            if answer.status_code == 200:
                continue
            assert answer.status_code == 400, answer.text
            error, num_refused = answer.json()["error"], num_refused + 1
            assert error["param"], (path, place, told, error)
            assert error["param"] in error["message"], error
            assert _roots(place) & _roots(_steps(error["param"])), (place, told, error)
    assert num_refused > 600 / step


TEXT = {"type": "text", "text": "a"}


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def items(*found):
    return {"input": list(found)}


@pytest.mark.parametrize(
    ("dialect", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, user([{"text": "a"}]), "messages[0].content[0].type"),
        (CHAT, user([TEXT, {"type": "text"}]), "messages[0].content[1].text"),
        (CHAT, user(3), "messages[0].content"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {
            "name": "f"}}]}]}, "messages[0].tool_calls[0].type"),
        (CHAT, {"messages": HI, "tools": [FUNCTION, {"type": "function", "function": {
            "name": "g", "parameters": {"type": "x"}}}]}, "tools[1]"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "strict": True, "schema": {"not": {}}}}},
         "response_format.json_schema.schema"),
        (RESPONSES, {"input": "q", "instructions": [{"role": "system", "content": "i"}]},
         "instructions"),
        (RESPONSES, items({"role": "user", "content": [{"text": "a"}]}),
         "input[0].content[0].type"),
        (RESPONSES, items({"type": "function_call", "name": "f"}), "input[0].call_id"),
        (RESPONSES, items({"type": "function_call_output", "call_id": "c"}), "input"),
        (RESPONSES, {"input": "q", "text": {"format": {
            "type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text"),
        (MESSAGES, user([{"text": "a"}]), "messages[0].content[0].type"),
        (MESSAGES, {**user("q"), "system": [{"text": "a"}]}, "system[0].type"),
        (MESSAGES, user([{"type": "tool_result", "tool_use_id": "t", "content": [{"text": "a"}]}]),
         "messages[0].content[0].content[0].type"),
        (MESSAGES, {"messages": HI, "tools": [{"name": "f"}]}, "tools[0].input_schema"),
        (MESSAGES, {"messages": HI, "output_config": {"format": {
            "type": "json_schema", "schema": {"required": 1}}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_the_place_is_exact(dialect, body, param):
    with pytest.raises(ApiError) as found:
        OFF.read(body, dialect)
    assert found.value.param == param
    assert found.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("raw", "param", "told"),
    [
        (b'{"a": [1, {"b": 1e999}]}', "a[1].b", "a[1].b: 1e999 is too large a number"),
        (b'{"a": -Infinity}', "a", "a: -Infinity is no number of JSON"),
        (b'{"a": {"b": "\\ud800"}}', "a.b", "a.b: holds half of a surrogate pair"),
        (b'{"a": {"\\udfff": 1}}', "a", "a: holds half of a surrogate pair"),
        (b"NaN", None, "the body: NaN is no number of JSON"),
        (b'{"a" 1}', None, "line 1 column 6 (char 5)"),
        (b'{"a": "\xff"}', None, "the body must be UTF-8, which its byte 7 is not"),
        (b'\xef\xbb\xbf{"a": "\xff"}', None, "byte 10"),
    ],
)
def test_what_is_no_json_for_us_has_a_place(raw, param, told):
    with pytest.raises(ApiError) as found:
        parse_object(raw)
    assert found.value.param == param
    assert told in found.value.message


def test_a_grammar_that_the_engine_refuses_is_that_of_its_field():
    refused = refusal_of(
        "grammar must be a Lark grammar that llguidance takes: too deep\nx", "tools"
    )
    assert (refused.param, refused.message) == ("tools", "tools: cannot be held: too deep")
    assert refusal_of("seed must be small, got 9", "tools").param == "seed"


def test_depth_is_bounded_the_same_by_every_python():
    def nested(depth):
        return b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b', "b": "[[[[\\"[[[["}'

    assert parse_object(nested(200))["b"] == '[[[["[[[['
    for raw in (nested(201), b"[" * 5000, b'{"a":' * 1000):
        with pytest.raises(ApiError, match="nested too deep: at most 200") as found:
            parse_object(raw)
        assert found.value.status == 400


def test_numbers_and_pairs_that_are_whole_are_taken():
    assert parse_object(b'{"a": "\\ud83d\\ude00", "b": 1e300}') == {"a": "😀", "b": 1e300}
