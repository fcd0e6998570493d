"""Earlier turns mean the same in every spelling in which clients give them back."""

import pytest

from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES, check_dialect
from helpers.offline import Offline
from helpers.serve import MODEL

OFF = Offline()
OBJECT = {"type": "object"}
HI = {"role": "user", "content": "hi"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": OBJECT}}]}
ITEM_TOOLS = {"tools": [{"type": "function", "name": "f", "parameters": OBJECT}]}


def said(content, **more):
    return {"role": "assistant", "content": content} | more


def asks(arguments, **more):
    function = {"name": "f", "arguments": arguments}
    return said(None, tool_calls=[{"id": "c", "type": "function", "function": function}], **more)


def result(content):
    return {"role": "tool", "tool_call_id": "c", "content": content}


def calls(arguments):
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}


def output(value):
    return {"type": "function_call_output", "call_id": "c", "output": value}


def text(value, kind="text"):
    return {"type": kind, "text": value}


REFUSAL = {"type": "refusal", "refusal": "no"}
CHATS = {
    "no arguments": [[asks(one), result("r")] for one in ("{}", "", " \n", "null", None)],
    "no result": [[asks("{}"), result(one)] for one in ("", [], None)],
    "no text": [[said(one), HI] for one in ("", [], None)] + [[{"role": "assistant"}, HI]],
    "no calls": [[said("a", **one), HI] for one in ({}, {"tool_calls": []}, {"tool_calls": None})],
    "no calls to go on from": [
        [said("a", prefix=True, **one)] for one in ({}, {"tool_calls": []}, {"refusal": None})
    ],
    "a refusal": [
        [one, HI]
        for one in (
            said("no"), said([REFUSAL]), said(None, refusal="no"), said([], refusal="no"),
            said([text("no")], refusal=None),
        )
    ],
    "a text and a refusal": [
        [one, HI]
        for one in (said([text("a"), REFUSAL]), said("a", refusal="no"), said("a\n\nno"))
    ],
    "reasoning": [
        [asks("{}", **one), result("r")]
        for one in (
            {"reasoning_content": "R"}, {"reasoning": "R"},
            {"reasoning": "R", "reasoning_content": "R"},
            {"reasoning": "R", "reasoning_content": None},
        )
    ],
    "no reasoning": [
        [asks("{}", **one), result("r")] for one in ({}, {"reasoning": None}, {"reasoning": ""})
    ],
}  # fmt: skip
ITEMS = {
    "no arguments": [[calls(one), output("r")] for one in ("{}", "", "null", None)],
    "no output": [[calls("{}"), output(one)] for one in ("", [], None)],
    "an output": [
        [calls("{}"), output(one)]
        for one in ("r", [text("r", "input_text")], [text("r", "output_text")])
    ],
    "a refusal": [[said("no"), HI], [said([REFUSAL]), HI]],
    "no text": [[said(one), HI] for one in ("", [], None)],
}


@pytest.mark.parametrize("name", CHATS)
def test_messages_of_a_chat(name):
    bodies = [TOOLS | {"messages": [HI, *turns]} for turns in CHATS[name]]
    assert len({OFF.prompt(body, CHAT) for body in bodies}) == 1


@pytest.mark.parametrize("name", ITEMS)
def test_items_of_responses(name):
    bodies = [ITEM_TOOLS | {"input": [HI, *turns]} for turns in ITEMS[name]]
    assert len({OFF.prompt(body, RESPONSES) for body in bodies}) == 1


def test_what_they_say_is_in_the_prompt():
    """The first spelling of each is what the library reads; here is what it makes of some."""
    chat = {"messages": [HI, asks("null", reasoning="R"), result(None)]} | TOOLS
    end = OFF.prompt(chat, CHAT).partition("<｜Assistant｜>")[2]
    assert end.startswith("<think>R</think>")
    assert "parameter" not in end
    assert "<tool_result></tool_result>" in end
    assert ">no<" in OFF.prompt({"messages": [HI, said(None, refusal="no")]}, CHAT)


def test_what_the_model_is_not_told_is_named():
    """Its format has no errors of tools, nor fields that nobody knows."""
    asked = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    body = {
        "model": MODEL, "max_tokens": 1, "tools": [{"name": "f", "input_schema": OBJECT}],
        "messages": [HI, said([asked]), {"role": "user", "content": [answer]}],
    }  # fmt: skip
    prompt, left_out = OFF.prompt(body, MESSAGES), []
    check_dialect(body, MESSAGES, max_tools=9, left_out=left_out)
    assert left_out == []
    answer |= {"is_error": True, "weight": 3}
    body["messages"][0] = HI | {"timestamp": 1}
    body["messages"][1] = said([asked | {"index": 0}], uuid="a")
    body["tools"][0]["category"] = "b"
    assert OFF.prompt(body, MESSAGES) == prompt
    check_dialect(body, MESSAGES, max_tools=9, left_out=left_out)
    assert left_out == [
        "tools[].category", "messages[].timestamp", "messages[].content[].index",
        "messages[].uuid", "messages[].content[].is_error", "messages[].content[].weight",
    ]  # fmt: skip
    body["messages"] = [HI | {f"field{i}": 1 for i in range(200)}]
    check_dialect(body, MESSAGES, max_tools=9, left_out=left_out)
    assert len(left_out) < 100
