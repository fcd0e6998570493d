"""Answers over HTTP are those of `Engine.generate`: of any form, with drafts, beside 64 others."""

import concurrent.futures
import itertools
import json
import re

import pytest

import dsv4_jax as ds
from dsv4_jax.serve import ServeSettings
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import CHAT
from helpers import slow
from helpers.clients import openai
from helpers.serve import MODEL, TOKENIZERS, running, small_engine

PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
        "name": {"type": "string", "pattern": "^[a-e]{0,4}$"},
    },
    "required": ["age", "tags", "name"],
    "additionalProperties": False,
}
FUNCTION = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Ulm"]}, "days": {"enum": [1, 20]}},
        "required": ["city", "days"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
FORMS = {
    "json": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}},
        "logprobs": True,
    },
    "call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}
"""Forms of answers, as they are asked for."""

ASKED = [
    ("json", {"temperature": 0.0, "seed": 1}, False),
    ("json", {"temperature": 1.0, "seed": 2}, True),
    ("call", {"temperature": 0.0, "seed": 3}, True),
    ("call", {"temperature": 1.3, "seed": 4}, False),
]
"""A form, how it is drawn, and whether it is streamed."""

OTHERS = [
    (f"{'A prompt' * (i % 5)} {i}", {"temperature": 0.8 * (i % 2), "seed": i}, 1 + i % 5)
    for i in range(64)
]


def body_of(number):
    """A conversation that asks for a form of its answer."""
    form, drawing, _ = ASKED[number]
    messages = [{"role": "user", "content": f"number {number}"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 300}
    return body | {"thinking": {"type": "disabled"}} | FORMS[form] | drawing


def expect(engine, number):
    """What `generate` gives for the same prompt and grammar, alone."""
    form, drawing, _ = ASKED[number]
    reader = Conversations(ServeSettings(model_name=MODEL), engine.tokenizer.to_str(), 2048)
    asked = reader.read(body_of(number), CHAT)
    (done,) = engine.generate(
        [asked.prompt_ids],
        max_new_tokens=300,
        grammar=asked.sampling.grammar,
        logprobs=0 if form == "json" else None,
        **drawing,
    )
    assert done.finish_reason == "stop"
    return done


def ask(client, number):
    """What the server answers: its text or arguments, its tokens' log-probabilities, its length."""
    body, streams = body_of(number), ASKED[number][2]
    body["extra_body"] = {"thinking": body.pop("thinking")}
    if streams:
        body["stream_options"] = {"include_usage": True}
        events = list(client.chat.completions.create(**body, stream=True))
        usage = events[-1].usage
        choices = [choice for event in events for choice in event.choices]
        parts = [choice.delta for choice in choices]
    else:
        done = client.chat.completions.create(**body)
        usage, choices = done.usage, done.choices
        parts = [choice.message for choice in choices]
    calls = [call.function for part in parts for call in part.tool_calls or ()]
    text = "".join(part.content or "" for part in parts)
    text += "".join(call.arguments or "" for call in calls)
    drawn = [
        (one.token, one.logprob)
        for choice in choices
        if choice.logprobs is not None
        for one in choice.logprobs.content or ()
    ]
    assert "".join(call.name or "" for call in calls) in ("", "weather")
    return text, drawn, usage.completion_tokens


def check(answer, number, expected, engine):
    text, drawn, count = answer
    ids = expected.token_ids
    told = engine.tokenizer.decode(ids[:-1], skip_special_tokens=False)
    assert (count, ids[-1:]) == (len(ids), list(engine.config.eos_token_ids))
    if ASKED[number][0] == "json":
        assert text == told
        assert "".join(token for token, _ in drawn[: len(ids) - 1]) == told
        values = [one.logprob for one in expected.logprobs]
        assert [value for _, value in drawn] == pytest.approx(values[: len(drawn)], abs=1e-6)
        assert len(drawn) >= len(ids) - 1
    else:
        found = re.findall(r'name="(\w+)" string="(\w+)">(.*?)</｜DSML｜parameter>', told, re.S)
        arguments = {
            name: value if is_text == "true" else json.loads(value)
            for name, is_text, value in found
        }
        assert json.loads(text) == arguments
        assert list(arguments) == ["city", "days"]


def ask_other(client, number):
    prompt, drawing, count = OTHERS[number]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count} | drawing
    if number % 2:
        choice = client.completions.create(**body).choices[0]
        return choice.text, choice.finish_reason
    choices = [event.choices[0] for event in client.completions.create(**body, stream=True)]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason


GREEDY = ("released", "call", 0, False)  # to draw one of 129,280 tokens takes a CPU 100 ms
CASES = [GREEDY, *itertools.product(TOKENIZERS, ["json", "call"], [0, 3], [True])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer_name", "form", "draft_tokens", "draws"),
    slow.all_but([GREEDY], CASES),
    indirect=["tokenizer_name"],
)
def test_answers_of_a_form_are_those_of_generate(tokenizer, form, draft_tokens, draws):
    """Greedy and drawn, whole and streamed, alone and beside 64 others that have no form."""
    engine = small_engine(
        tokenizer, num_mtp_layers=int(draft_tokens > 0), draft_tokens=draft_tokens
    )

    def taken(cases):
        return [n for n, (_, how, _) in enumerate(cases) if draws or not how["temperature"]]

    numbers = [number for number in taken(ASKED) if ASKED[number][0] == form]
    expected = {number: expect(engine, number) for number in numbers}
    others = [OTHERS[number] for number in taken(OTHERS)]
    expected_of_others = engine.generate(
        [prompt for prompt, _, _ in others],
        sampling=[ds.SamplingParams(max_new_tokens=n, **drawing) for _, drawing, n in others],
    )
    with (
        running(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as client,
        concurrent.futures.ThreadPoolExecutor(72) as pool,
    ):
        for number, wanted in expected.items():
            check(ask(client, number), number, wanted, engine)
        sent = [pool.submit(ask_other, client, number) for number in taken(OTHERS)]
        asked = {number: pool.submit(ask, client, number) for number in numbers}
        for number, wanted in expected.items():
            check(asked[number].result(), number, wanted, engine)
        for one, done in zip(sent, expected_of_others, strict=True):
            assert one.result() == (done.text, done.finish_reason)
    assert draft_tokens == 0 or engine.metrics.accepted_tokens > 0
