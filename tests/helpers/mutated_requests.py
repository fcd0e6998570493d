"""Requests that are wrong in one place, made of requests that are right."""

import copy
import functools
import json
import operator

from helpers.agent_requests import CHAT, MESSAGES, REQUESTS, RESPONSES

HI = [{"role": "user", "content": "q"}]
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = OBJECT | {"additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/b"}]}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"b": {"enum": [1, 2]}},
}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": OBJECT}}
PLAIN = {"thinking": {"type": "disabled"}}

CHATS = [
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "developer", "content": [{"type": "text", "text": "d"}]},
            {"role": "user", "content": [{"type": "text", "text": "q"}], "name": "B"},
            {"role": "assistant", "reasoning_content": "r", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
             "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "y", "prefix": True},
        ],
        "tools": [FUNCTION], "stop": ["x"], "n": 2, "seed": 1, "logit_bias": {"5": 1},
        "logprobs": True, "top_logprobs": 2, "temperature": 0.5, "top_p": 0.5, "max_tokens": 5,
        "stream": True, "stream_options": {"include_usage": True}, "user": "u", **PLAIN,
    },
    {"messages": HI, "tools": [FUNCTION], "parallel_tool_calls": False, **PLAIN,
     "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"messages": HI, "tools": [FUNCTION], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "f"}}]}}},
    {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "description": "d", "strict": True, "schema": SCHEMA}}},
]  # fmt: skip
RESPONSES_BODIES = [
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}],
             "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "d", "name": "g", "namespace": "ns",
             "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
             "output": [{"type": "input_text", "text": "o"}]},
            {"type": "function_call_output", "call_id": "d", "output": "o"},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "a", "annotations": []},
                {"type": "refusal", "refusal": "n"}]},
            {"type": "message", "role": "developer", "content": "d"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": OBJECT, "strict": False},
            {"type": "namespace", "name": "ns", "description": "d", "tools": [
                {"type": "function", "name": "g", "parameters": OBJECT}]},
        ],
        "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "none"},
    },
    {"input": "q", "instructions": "i", "top_logprobs": 2, "temperature": 1, "top_p": 1,
     "include": ["message.output_text.logprobs"], "max_output_tokens": 4, "truncation": "auto",
     "text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}}},
    {"input": "q", "tools": [{"type": "function", "name": "f", "parameters": OBJECT}],
     "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
         {"type": "function", "name": "f"}]}},
]  # fmt: skip
TOOLS = [{"name": "f", "description": "d", "input_schema": CLOSED}]
MESSAGES_BODIES = [
    {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [
                    {"type": "text", "text": "r"}, {"type": "tool_reference", "tool_name": "f"}]},
                {"type": "text", "text": "go"}]},
            {"role": "assistant", "content": "pre"},
        ],
        "tools": TOOLS, "tool_choice": {"type": "auto"}, "stop_sequences": ["x"],
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "metadata": {"user_id": "u"}, **PLAIN,
    },
    {"messages": HI, "tools": TOOLS, "tool_choice": {
        "type": "tool", "name": "f", "disable_parallel_tool_use": True}, **PLAIN},
    {"messages": HI, "output_config": {
        "effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
     "context_management": {"edits": [{
         "type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}},
]  # fmt: skip
OTHERS = [
    ("/v1/completions", {
        "prompt": ["a", "b"], "max_tokens": 1, "n": 2, "stream": True, "logprobs": 2, "seed": 1,
        "stream_options": {"include_usage": True}, "stop": ["x"], "temperature": 0.5,
        "logit_bias": {"5": 1}, "top_p": 0.9, "top_k": 4, "presence_penalty": 1, "user": "u"}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1, "echo": True}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2]}),
]  # fmt: skip
"""Requests that hold no conversation."""

CONVERSATIONS = [
    *((CHAT, body) for body in CHATS),
    *((RESPONSES, body) for body in RESPONSES_BODIES),
    *((MESSAGES, body) for body in MESSAGES_BODIES),
    *((path, body) for path, body, _ in REQUESTS.values()),
]
"""By path; those of agents are among them."""

VALUES = [
    None, True, False, 0, -1, 1.5, 10**30, "", "x", "auto", [], {}, [None], [1], ["x"], [[]], [{}],
    {"x": 1}, {"type": "x"}, {"type": None}, {"type": 1}, {"text": "a"}, [{"type": "text"}],
    [{"text": "a"}], [{"type": "text", "text": 1}],
]  # fmt: skip


def places(value, path=()):
    """Paths to everything in a value of JSON."""
    if path:
        yield path
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in inner:
            yield from places(one, (*path, key))


def mutations(body):
    """What can be done to a body in one place: (path, what, a function that makes the body)."""
    for path in places(body):
        *lead, key = path

        def make(change, *given, lead=lead, key=key):
            new = copy.deepcopy(body)
            inner = new
            for step in lead:
                inner = inner[step]
            change(inner, key, *copy.deepcopy(given))
            return new

        yield path, "gone", functools.partial(make, operator.delitem)
        for value in VALUES:
            yield path, json.dumps(value), functools.partial(make, operator.setitem, value)
        if isinstance(key, int):
            yield path, "twice", functools.partial(make, lambda one, key: one.insert(key, one[key]))
            yield path, "reversed", functools.partial(make, lambda one, key: one.reverse())
