"""Turns of agents: results come after their calls, and a last message is gone on with."""

import itertools
import json

import httpx
import pytest

from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serving.requests.request import Completion, Token
from dsv4_jax.serving.requests.text import TextState
from helpers.offline import Offline
from helpers.serve import MODEL

OFF = Offline()
HI = {"role": "user", "content": "hi"}
JSON = {"role": "user", "content": "json"}
PLAIN = {"thinking": {"type": "disabled"}}
BEGIN = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"
OBJECT = {"type": "object"}
TOOLS = {
    CHAT.name: [{"type": "function", "function": {"name": "f", "parameters": OBJECT}}],
    MESSAGES.name: [{"name": "f", "input_schema": OBJECT}],
    RESPONSES.name: [{"type": "function", "name": "f", "parameters": OBJECT}],
}


def said(content, **more):
    return {"role": "assistant", "content": content} | more


def part(text):
    return {"type": "text", "text": text}


def thought(text):
    return {"type": "thinking", "thinking": text, "signature": "s"}


# A message that is continued.

CONTINUED = {
    "a text": (said("The "), "</think>The ", "<think></think>The "),
    "white space": (said(" \n"), "</think> \n", "<think></think> \n"),
    "parts": (said([part("a"), part(" b ")]), "</think>a\n\n b ", "<think></think>a\n\n b "),
    "nothing": (said(""), "</think>", "<think>"),
    "no part": (said([]), "</think>", "<think>"),
    "a special token's text": (said("<think>"), "</think><think>", "<think></think><think>"),
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("dialect", [CHAT, MESSAGES], ids=["chat", "messages"])
@pytest.mark.parametrize("thinks", [False, True])
def test_the_prompt_ends_with_the_message_that_is_continued(name, dialect, thinks):
    message, *wanted = CONTINUED[name]
    message = message | ({"prefix": True} if dialect is CHAT else {})
    body = {"messages": [HI, message]} | ({} if thinks else PLAIN)
    assert OFF.prompt(body, dialect) == BEGIN + wanted[thinks]


def test_reasoning_is_continued_where_no_text_follows_it():
    for body, dialect in (
        ({"messages": [HI, said("", reasoning_content="R ", prefix=True)]}, CHAT),
        ({"messages": [HI, said(None, reasoning_content="R ", prefix=True)]}, CHAT),
        ({"messages": [HI, said([thought("R ")])]}, MESSAGES),
    ):
        assert OFF.prompt(body, dialect) == f"{BEGIN}<think>R "
        answer = OFF.answer(body, dialect, "\nmore</think>\n\nText")
        if dialect is CHAT:
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("\nmore", "Text")
        else:
            assert [one.get("thinking", one.get("text")) for one in answer["content"]] == [
                "\nmore",
                "Text",
            ]
    for body, dialect in (
        ({"messages": [HI, said("The ", reasoning_content="R ", prefix=True)]}, CHAT),
        ({"messages": [HI, said([thought("R "), part("The ")])]}, MESSAGES),
    ):
        assert OFF.prompt(body, dialect) == f"{BEGIN}<think>R </think>The "


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_the_answer_holds_what_follows_and_nothing_else(thinks, streams):
    text, extra = "\n answer", {"stream": streams} | ({} if thinks else PLAIN)
    answer = OFF.answer({"messages": [HI, said("The")]} | extra, MESSAGES, text)
    chat = OFF.answer({"messages": [HI, said("The", prefix=True)]} | extra, CHAT, text)
    if streams:
        blocks = [one for one in answer if one["type"] == "content_block_start"]
        assert [one["content_block"]["type"] for one in blocks] == ["text"]
        deltas = [one["delta"] for one in answer if one["type"] == "content_block_delta"]
        assert "".join(one["text"] for one in deltas) == text
        deltas = [one["choices"][0]["delta"] for one in chat]
        assert "".join(one.get("content") or "" for one in deltas) == text
        assert not any(one.get("reasoning_content") for one in deltas)
    else:
        assert answer["content"] == [part(text)]
        message = chat["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content") or "") == (text, "")


def test_calls_are_read_after_a_message_that_is_continued():
    mark = "｜DSML｜"
    text = (
        f" look.\n\n<{mark}tool_calls>\n<{mark}invoke name=\"f\">\n<{mark}parameter name=\"a\" "
        f'string="true">x</{mark}parameter>\n</{mark}invoke>\n</{mark}tool_calls>'
    )  # fmt: skip
    body = {"messages": [HI, said("I")], "tools": TOOLS[MESSAGES.name]}
    spoken, call = OFF.answer(body, MESSAGES, text)["content"]
    assert (spoken["text"], call["name"], call["input"]) == (" look.", "f", {"a": "x"})
    body = {"messages": [HI, said("I", prefix=True)], "tools": TOOLS[CHAT.name]}
    message = OFF.answer(body, CHAT, text)["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (" look.", 1)


def test_an_assistants_last_message_without_prefix_ends():
    """So in OpenAI's protocols: the answer is a new message."""
    end = "The<｜end▁of▁sentence｜><｜Assistant｜></think>"
    for more in ({}, {"prefix": False}, {"prefix": None}):
        body = {"messages": [HI, said("The", **more)]} | PLAIN
        assert OFF.prompt(body, CHAT).endswith(end)
    body = {"input": [HI, said("The")], "reasoning": {"effort": "none"}}
    assert OFF.prompt(body, RESPONSES).endswith(end)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": OBJECT}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}}
REFUSED = {
    "prefix of the user": (CHAT, {"messages": [HI | {"prefix": True}]}, "messages[0].prefix"),
    "prefix before the end": (
        CHAT,
        {"messages": [HI, said("a", prefix=True), HI]},
        "messages[1].prefix",
    ),
    "a text as prefix": (CHAT, {"messages": [HI, said("a", prefix="yes")]}, "messages[1].prefix"),
    "calls": (
        CHAT,
        {"messages": [HI, said("a", prefix=True, tool_calls=[CALL])]},
        "messages[1].tool_calls",
    ),
    "tool_use": (
        MESSAGES,
        {
            "messages": [
                HI,
                said([part("a"), {"type": "tool_use", "id": "t", "name": "f", "input": {}}]),
            ]
        },
        "messages[1].content",
    ),
    "reasoning without thinking": (
        CHAT,
        {"messages": [HI, said("a", reasoning_content="R", prefix=True)]} | PLAIN,
        "messages[1]",
    ),
    "thinking without thinking": (
        MESSAGES,
        {"messages": [HI, said([thought("R"), part("a")])]} | PLAIN,
        "messages[1]",
    ),
    "prefix of an item": (RESPONSES, {"input": [HI, said("a", prefix=True)]}, "input[1].prefix"),
    "JSON": (
        CHAT,
        {"messages": [JSON, said("{", prefix=True)], "response_format": {"type": "json_object"}},
        "messages[1]",
    ),
    "a schema": (
        CHAT,
        {"messages": [HI, said("{", prefix=True)], "response_format": SCHEMA},
        "messages[1]",
    ),
    "a strict tool": (
        CHAT,
        {"messages": [HI, said("a", prefix=True)], "tools": [STRICT]},
        "messages[1]",
    ),
    "a call that must come": (
        MESSAGES,
        {
            "messages": [HI, said("a")],
            "tools": TOOLS[MESSAGES.name],
            "tool_choice": {"type": "any"},
        },
        "messages[1]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_continued_is_refused_by_name(name):
    dialect, body, param = REFUSED[name]
    with pytest.raises(ApiError) as found:
        OFF.read(body, dialect)
    assert (found.value.status, found.value.param) == (400, param)


def test_a_form_begins_after_reasoning_that_is_continued():
    messages = [JSON, said("", reasoning_content="R", prefix=True)]
    body = {"messages": messages, "response_format": {"type": "json_object"}}
    assert OFF.read(body, CHAT).sampling.grammar is not None


def test_a_message_is_continued_by_the_server(other_engine, server):
    body = {"model": MODEL, "messages": [HI, said("The ")]} | PLAIN
    ids = other_engine.tokenizer.encode(f"{BEGIN}</think>The ", add_special_tokens=False).ids
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(ids)}
    sampled = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/messages", json=body | sampled).json()
    (expected,) = other_engine.generate([ids], max_new_tokens=5, stop_token_ids=())
    assert answer["usage"]["input_tokens"] == len(ids)
    told = "".join(one["text"] for one in answer["content"])
    assert told == expected.text
    assert answer["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES], ids=["chat", "messages"])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_an_answer_that_ends_within_a_character_loses_and_miscounts_nothing(dialect, group):
    ids = OFF.tokenizer.encode("a猫猫", add_special_tokens=False).ids[:-1]
    asked = OFF.read({"messages": [HI]} | PLAIN, dialect)
    renderer = ConversationRenderer(asked, dialect, MODEL, OFF.conversations.tokenizer)
    renderer.start(0)
    state, tokens = TextState(), []
    for token_id in ids:
        state, text = state.add(token_id, OFF.tokenizer)
        tokens.append(Token(0, token_id, None, text))
    rest = state.rest(OFF.tokenizer)  # as an engine gives it with the last token
    tokens[-1] = tokens[-1]._replace(finish_reason="length", text=rest)
    for start in range(0, len(tokens), group):
        renderer.tokens(0, tokens[start : start + group])
    answer = json.loads(renderer.end([Completion(ids, None, "length", prompt_tokens=1)]))
    message = answer["choices"][0]["message"] if dialect is CHAT else {}
    told = message.get("content") or answer["content"][0]["text"]
    counted = answer["usage"]["completion_tokens" if dialect is CHAT else "output_tokens"]
    assert (told, counted) == ("a猫\ufffd", len(ids))


# Calls and their results.


def call(name):
    return {
        "type": "function_call",
        "call_id": name,
        "name": "f",
        "arguments": json.dumps({"i": name}),
    }


def result(name):
    return {"type": "function_call_output", "call_id": name, "output": f"result {name}"}


def reasoned(text):
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


HOOK = {"role": "developer", "content": "HOOK"}
ITEMS = {
    "a developer's message": ([call("a"), HOOK, result("a")], "a|ra|HOOK"),
    "the system's": ([call("a"), HOOK | {"role": "system"}, result("a")], "HOOK|a|ra"),
    "the user's": ([call("a"), HOOK | {"role": "user"}, result("a")], "a|ra|HOOK"),
    "the assistant's": ([call("a"), said("SAID"), result("a")], "SAID|a|ra"),
    "between results": (
        [call("a"), call("b"), result("b"), HOOK, result("a")],
        "a|b|ra|rb|HOOK",
    ),
    "between calls": ([call("a"), HOOK, call("b"), result("a"), result("b")], "a|b|ra|rb|HOOK"),
    "another order": ([call("a"), call("b"), result("b"), result("a")], "a|b|ra|rb"),
    "one after another": ([call("a"), result("a"), call("b"), result("b")], "a|ra|b|rb"),
    "reasoning of each": (
        [reasoned("R1"), call("a"), reasoned("R2"), call("b"), result("a"), result("b")],
        "R1|R2|a|b|ra|rb",
    ),
    "reasoning while one runs": (
        [
            *(reasoned("R1"), call("a"), call("b"), result("a")),
            *(reasoned("R2"), call("c"), HOOK, result("b"), result("c")),
        ],
        "R1|a|b|ra|rb|R2|c|rc|HOOK",
    ),
    "three that overlap": (
        [call("a"), call("b"), result("a"), call("c"), result("c"), HOOK, result("b")],
        "a|b|c|ra|rb|rc|HOOK",
    ),
}


def order_of(text):
    """The calls, results and texts of a prompt, in their order."""
    marks = {f'string="true">{name}<': name for name in "abc"}
    marks |= {f"<tool_result>result {name}<": f"r{name}" for name in "abc"}
    marks |= {word: word for word in ("HOOK", "SAID", "R1", "R2")}
    found = [(text.index(mark), name) for mark, name in marks.items() if text.count(mark) == 1]
    assert len(found) == sum(text.count(mark) > 0 for mark in marks)
    return "|".join(name for _, name in sorted(found))


@pytest.mark.parametrize("name", ITEMS)
def test_results_come_after_their_calls_in_responses(name):
    items, wanted = ITEMS[name]
    assert (
        order_of(OFF.prompt({"input": [HI, *items], "tools": TOOLS[RESPONSES.name]}, RESPONSES))
        == wanted
    )


def test_every_order_of_results_and_a_message_is_one_turn():
    messages = [result("a"), result("b"), HOOK]
    prompts = {
        OFF.prompt(
            {"input": [HI, call("a"), call("b"), *order], "tools": TOOLS[RESPONSES.name]}, RESPONSES
        )
        for order in itertools.permutations(messages)
    }
    assert len(prompts) == 1


def calls_of(*names):
    return said(
        "SAID" if names == ("a",) else "",
        tool_calls=[
            CALL | {"id": one, "function": {"name": "f", "arguments": json.dumps({"i": one})}}
            for one in names
        ],
    )


def tool(name):
    return {"role": "tool", "tool_call_id": name, "content": f"result {name}"}


NOTE = {"role": "latest_reminder", "content": "HOOK"}
CHATS = {
    "a developer's message": ([calls_of("a"), HOOK, tool("a")], "HOOK|SAID|a|ra"),
    "a reminder": ([calls_of("a"), NOTE, tool("a")], "SAID|a|ra|HOOK"),
    "the user's": ([calls_of("a"), HI | {"content": "HOOK"}, tool("a")], "SAID|a|ra|HOOK"),
    "between results": ([calls_of("a", "b"), tool("b"), NOTE, tool("a")], "a|b|ra|rb|HOOK"),
    "two messages": ([calls_of("a"), calls_of("b"), tool("b"), tool("a")], "SAID|a|ra|b|rb"),
    "one name in two turns": (
        [calls_of("a"), NOTE, tool("a"), HI, calls_of("a"), tool("a")],
        None,
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_results_come_after_their_calls_in_chat(name):
    messages, wanted = CHATS[name]
    told = OFF.prompt({"messages": [HI, *messages], "tools": TOOLS[CHAT.name]}, CHAT)
    if wanted is None:
        assert told.count("result a") == told.count('string="true">a<') == 2
    else:
        assert order_of(told) == wanted


def use(name):
    return {"type": "tool_use", "id": name, "name": "f", "input": {"i": name}}


def used(name):
    return {"type": "tool_result", "tool_use_id": name, "content": f"result {name}"}


def user(*parts):
    return {"role": "user", "content": list(parts)}


SYSTEM = {"role": "system", "content": "HOOK"}
MESSAGE_TURNS = {
    "the system's": ([said([use("a")]), SYSTEM, user(used("a"))], "a|ra|HOOK"),
    "text first": ([said([use("a")]), user(part("HOOK"), used("a"))], "a|ra|HOOK"),
    "two messages": ([said([use("a"), use("b")]), user(used("b")), user(used("a"))], "a|b|ra|rb"),
    "a text between": (
        [said([use("a")]), {"role": "user", "content": "HOOK"}, user(used("a"))],
        "a|ra|HOOK",
    ),
    "text after a call": ([said([use("a"), part("SAID")]), user(used("a"))], "SAID|a|ra"),
}


@pytest.mark.parametrize("name", MESSAGE_TURNS)
def test_results_come_after_their_calls_in_messages(name):
    messages, wanted = MESSAGE_TURNS[name]
    told = OFF.prompt({"messages": [HI, *messages], "tools": TOOLS[MESSAGES.name]}, MESSAGES)
    assert order_of(told) == wanted


def test_a_call_without_a_result_is_refused_wherever_it_stands():
    for dialect, body in (
        (RESPONSES, {"input": [HI, call("a"), HOOK]}),
        (RESPONSES, {"input": [HI, call("a"), call("b"), result("a"), reasoned("R"), HI]}),
        (RESPONSES, {"input": [HI, result("a"), call("a")]}),
        (CHAT, {"messages": [HI, calls_of("a"), HOOK, HI]}),
        (CHAT, {"messages": [HI, tool("a"), calls_of("a")]}),
        (MESSAGES, {"messages": [HI, said([use("a")]), SYSTEM, HI]}),
        (MESSAGES, {"messages": [HI, said([use("a"), use("b")]), user(used("a")), said("x"), HI]}),
    ):
        with pytest.raises(ApiError) as found:
            OFF.read(body | {"tools": TOOLS[dialect.name]}, dialect)
        assert found.value.status == 400


# Reasoning that is given back sealed.


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("content", [None, [], [{"type": "reasoning_text", "text": ""}]])
def test_reasoning_comes_back_by_its_encrypted_content(streams, content):
    text = "Why, é猕 😀\u2028 </think".strip()
    answer = OFF.answer({"input": "hi", "stream": streams}, RESPONSES, f"{text}</think>Ok.")
    if streams:
        done = [one["item"] for one in answer if one["type"] == "response.output_item.done"]
        answer = answer[-1]["response"]
        assert done[0] == answer["output"][0]
    first, message = answer["output"]
    given = {key: one for key, one in first.items() if key != "content"}
    given |= {} if content is None else {"content": content}
    body = {"input": [HI, given, message, call("a"), result("a")], "tools": TOOLS[RESPONSES.name]}
    assert f"<think>{text}</think>" in OFF.prompt(body, RESPONSES)
    assert OFF.prompt(body, RESPONSES) == OFF.prompt(
        body | {"input": [HI, first, message, call("a"), result("a")]}, RESPONSES
    )


def test_what_others_have_sealed_is_no_text_for_the_model():
    for sealed in ("gAAAAABotherblob==", "resp_0123-0", "dsv4", "", None):
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        body = {"input": [HI, item, call("a"), result("a")], "tools": TOOLS[RESPONSES.name]}
        without = {"input": [HI, call("a"), result("a")], "tools": TOOLS[RESPONSES.name]}
        assert OFF.prompt(body, RESPONSES) == OFF.prompt(without, RESPONSES)


@pytest.mark.parametrize("damaged", ["%%%", "YQ", "/w==", "YQ==YQ=="])
def test_what_was_sealed_here_and_is_damaged_is_refused(damaged):
    item = {"type": "reasoning", "summary": [], "encrypted_content": f"dsv4-jax:1:{damaged}"}
    with pytest.raises(ApiError, match="damaged") as found:
        OFF.read({"input": [HI, item]}, RESPONSES)
    assert found.value.param == "input[1].encrypted_content"
