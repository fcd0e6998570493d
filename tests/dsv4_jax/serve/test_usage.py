"""Usage: what a request counts, in answers and in the log, also of several choices and prompts."""

import itertools
import json
import re

import httpx
import pytest

from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serving import Completion, Token
from dsv4_jax.serving.requests.text import TextState
from helpers import slow
from helpers.offline import Offline
from helpers.serve import (
    END,
    MODEL,
    added_ids,
    byte_ids,
    ids_of,
    running,
    script,
)
from helpers.serving import until

HI = [{"role": "user", "content": "hi"}]
REASONING, TEXT = "think a while", "one two three"
USAGE = {"include_usage": True}
PATHS = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def server(engine):
    with pytest.MonkeyPatch.context() as patch, running(engine) as server:
        script(patch, engine, f"{REASONING}</think>{TEXT}")
        yield server


@pytest.fixture
def ask(server, caplog):
    """What asks, and gives the usage that a client gets and the line of the log."""
    caplog.set_level("INFO", "dsv4_jax.serve")

    def post(path, *, streams=False, **body):
        caplog.clear()
        body = {"model": MODEL, "max_tokens": 90} | body
        if streams:
            body |= {"stream": True, "stream_options": USAGE}
        answer = httpx.post(server.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        until(lambda: caplog.records)
        (line,) = (json.loads(one.getMessage()) for one in caplog.records)
        if not streams:
            return answer.json()["usage"], line
        data = [
            one.removeprefix("data: ") for one in answer.text.splitlines() if one[:6] == "data: "
        ]
        events = [json.loads(one) for one in data if one != "[DONE]"]
        (usage,) = (event["usage"] for event in events if event.get("usage"))
        return usage, line

    return post


def counts(prompt_tokens, answer_tokens, reasoning_tokens, hit_tokens=0):
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": hit_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "prompt_cache_hit_tokens": hit_tokens,
        "prompt_cache_miss_tokens": prompt_tokens - hit_tokens,
    }


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("thinks", "n"),
    slow.all_but([(True, 3)], list(itertools.product([False, True], [1, 2, 3]))),
)
def test_choices_count_what_each_of_them_has(ask, tokenizer, thinks, n, streams):
    """One choice has the library's own counts, and several have the sum of theirs."""
    thinking = {"type": "enabled" if thinks else "disabled"}
    usage, line = ask(PATHS[0], messages=HI, n=n, streams=streams, thinking=thinking)
    reasoning, text = (len(ids_of(tokenizer, one)) for one in (REASONING, TEXT))
    prompt = 4 + len(ids_of(tokenizer, "hi"))
    drawn = reasoning + 1 + text + 1
    reasoning = reasoning if thinks else 0
    assert usage == counts(prompt, n * drawn, n * reasoning)
    assert (line["prompt_tokens"], line["drawn_tokens"]) == (prompt, n * drawn)
    assert line["finish"] == ["stop"] * n
    _, line = ask(PATHS[0], messages=HI, n=n, streams=streams, thinking=thinking, max_tokens=5)
    assert line["finish"] == ["length"] * n


@pytest.mark.parametrize("streams", [False, True])
def test_choices_that_a_stop_text_ends_count_up_to_it(ask, streams):
    one, _ = ask(PATHS[0], messages=HI, stop="two", streams=streams)
    usage, _ = ask(PATHS[0], messages=HI, stop="two", streams=streams, n=2)
    reasoning = one["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < one["completion_tokens"] < 90
    assert usage == counts(one["prompt_tokens"], 2 * one["completion_tokens"], 2 * reasoning)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES], ids=lambda one: one.name)
def test_tokens_without_text_count(dialect, streams, tokenizer):
    """Parts of characters, alone, before a token that is no text, and at the end of an answer."""
    off, turns = Offline(tokenizer), "hi" if dialect is RESPONSES else HI
    body = {dialect.turns: turns, "stream": streams}
    if dialect is CHAT and streams:
        body["stream_options"] = USAGE
    letter, lead, tail = byte_ids(tokenizer, "aé".encode())
    special, end = (added_ids(tokenizer)[one] for one in ("<｜User｜>", END))
    cut = [[lead], [letter, lead, special, lead], [letter, special, lead], [lead, tail]]
    ended = [[end], [lead, end], [letter, lead, special, end]]
    for ids in cut + ended:
        reason = "stop" if ids[-1] == end else "length"
        asked = off.read(body, dialect)
        renderer = ConversationRenderer(asked, dialect, MODEL, off.conversations.tokenizer)
        given, state = renderer.start(0), TextState()
        for place, token in enumerate(ids):
            state, text = state.add(token, off.tokenizer)
            is_last = place == len(ids) - 1
            text += state.rest(off.tokenizer) if is_last else ""
            given += renderer.tokens(0, [Token(0, token, reason if is_last else None, text)])
        assert not renderer.is_done(0)  # it has found no stop text
        done = Completion(ids, None, reason, prompt_tokens=len(asked.prompt_ids))
        given = (given + renderer.end([done])).decode()
        found = re.findall(r'"(?:output|completion)_tokens": ?(\d+)', given)
        assert int(found[-1]) == len(ids), (ids, given)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_each_of_several_prompts_counts_once(ask, tokenizer, n, streams):
    prompts = ["hi", "hello there", "x"]
    usage, line = ask(PATHS[1], prompt=prompts, n=n, max_tokens=3, streams=streams)
    expected = sum(len(tokenizer.encode(prompt).ids) for prompt in prompts)
    assert usage == counts(expected, 3 * 3 * n, 0)
    assert line["prompt_tokens"] == expected
    assert (line["hit_tokens"], line["drawn_tokens"]) == (0, 3 * 3 * n)


def test_hits_of_several_prompts_are_all_counted(ask):
    prompts = [[5] * 300, [6] * 300]
    for prompt in prompts:
        ask(PATHS[1], prompt=prompt, max_tokens=1)
    usage, line = ask(PATHS[1], prompt=prompts, max_tokens=1, n=2)
    assert usage == counts(600, 4, 0, hit_tokens=512)
    assert (line["prompt_tokens"], line["hit_tokens"]) == (600, 512)


def test_what_a_schema_calls_usage_is_no_usage(tokenizer):
    schema = {"type": "object", "properties": {"usage": {"type": "integer"}}}
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    body = {"input": "q", "tools": tools, "stream": True}
    *events, last = Offline(tokenizer).answer(body, RESPONSES, "a")
    assert events[0]["response"]["tools"][0]["parameters"] == schema
    assert events[0]["response"]["usage"] is None
    assert last["response"]["usage"]["output_tokens"] == 2
