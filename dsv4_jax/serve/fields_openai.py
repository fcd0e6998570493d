"""The fields of `/v1/completions`, `/v1/chat/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4_jax.serve.drawing import DRAWN
from dsv4_jax.serve.fields import (
    ANY,
    FLAG,
    NAME,
    NOTHING,
    OBJECT,
    TEXT,
    Rule,
    aside,
    closed,
    fields_of,
    listed,
    missing,
    needed,
    one_of,
    only,
    text_or,
)

EFFORTS = only("none", "minimal", "low", "medium", "high", "xhigh", "max")
TIERS = aside(
    *("auto", "default"),
    accepts=lambda value: (
        value in ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
    ),
    told="must be a tier of the protocol",
)
"""There is one tier; the protocol lets a server answer with another one than was asked for."""

VERBOSITY = aside(
    "medium",
    accepts=lambda value: value in ("low", "medium", "high"),
    told="must be 'low', 'medium' or 'high'",
)
CACHE_HINTS = {"cache_control": NOTHING, "prompt_cache_breakpoint": NOTHING}
"""Prefixes are kept anyway, and shared within a key."""

CACHE_OPTIONS = closed(
    mode=NOTHING,
    ttl=NOTHING,
    comparison_response_id=NOTHING,
    prewarm=only(False, told="every request is answered"),
)
_OF_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
DRAWING_EXTRAS = {
    **{name: ANY for name in DRAWN if name not in _OF_OPENAI},
    "ignore_eos": ANY,
    "repetition_penalty": only(1, 1.0, told="use presence_penalty and frequency_penalty"),
    "min_tokens": only(0),
}
_DRAWING = DRAWING_EXTRAS | dict.fromkeys(_OF_OPENAI, ANY)
CALLER = {
    "user": NOTHING,
    "service_tier": TIERS,
    "safety_identifier": NOTHING,
    "prompt_cache_key": NOTHING,
    "prompt_cache_retention": NOTHING,
    "prompt_cache_options": CACHE_OPTIONS,
    "cache_control": NOTHING,
    "metadata": NOTHING,
    "client_metadata": NOTHING,
}
"""Who asks, and hints at caches; LiteLLM passes them on in any protocol."""

STORE = aside(False, types=(bool,))
IGNORED_FLAG = Rule(types=(bool,), is_dropped=True)
_STREAM_OPTIONS = closed(
    include_usage=ANY,
    include_obfuscation=IGNORED_FLAG,
    continuous_usage_stats=only(False, told="usage comes at the end"),
)

COMPLETIONS = {
    **_DRAWING,
    **CALLER,
    "model": ANY,
    "prompt": ANY,
    "max_tokens": ANY,
    "n": ANY,
    "best_of": ANY,
    "stream": ANY,
    "stream_options": _STREAM_OPTIONS,
    "logprobs": ANY,
    "return_tokens_as_token_ids": ANY,
    "echo": ANY,
    "stop": ANY,
    "suffix": missing("the model does not fill in the middle"),
}

_PART = one_of(
    {
        "text": fields_of(
            type=ANY, text=needed(TEXT), citations=NOTHING, annotations=NOTHING, **CACHE_HINTS
        ),
        "refusal": fields_of(type=ANY, refusal=needed(TEXT), **CACHE_HINTS),
    },
    told="the model reads text",
)
_CALL = one_of(
    {
        "function": fields_of(
            id=needed(TEXT),
            type=ANY,
            index=NOTHING,
            function=needed(fields_of(name=needed(TEXT), arguments=TEXT)),
            **CACHE_HINTS,
        )
    },
    told="tools are functions here",
)
_MESSAGE_FIELDS = {
    "role": ANY,
    "content": text_or(_PART),
    "name": aside(),
    "tool_calls": listed(_CALL),
    "tool_call_id": TEXT,
    "reasoning_content": TEXT,
    "reasoning": TEXT,  # another name of the same
    "reasoning_details": aside(),
    "prefix": FLAG,
    "refusal": TEXT,
    "annotations": NOTHING,
    "audio": missing("the model reads text"),
    "function_call": missing("use tool_calls"),
    **CACHE_HINTS,
}
_SPOKEN = Rule(fields=_MESSAGE_FIELDS | {"content": needed(text_or(_PART))})
_MESSAGE = one_of(
    {
        **dict.fromkeys(("system", "developer", "user"), _SPOKEN),
        "assistant": Rule(fields=_MESSAGE_FIELDS),
        "tool": Rule(fields=_MESSAGE_FIELDS | {"tool_call_id": needed(TEXT)}),
        "latest_reminder": _SPOKEN,  # a role of V4's own
    },
    field="role",
)


def is_not_for_the_model(tool: Mapping[str, Any]) -> bool:
    """A tool that only programs of a server call: the model may not call it by itself."""
    callers = tool.get("allowed_callers")
    return isinstance(callers, list) and bool(callers) and "direct" not in callers


FUNCTION = fields_of(
    name=needed(NAME),
    description=TEXT,
    parameters=OBJECT,
    strict=FLAG,
    defer_loading=aside(False),
    output_schema=aside(),
    input_examples=aside([]),
    **CACHE_HINTS,
)
"""What a function says of itself; tools whose loading may be deferred are there at once."""

_TOOL = one_of(
    {
        "function": fields_of(type=ANY, function=needed(FUNCTION), **CACHE_HINTS),
        "custom": Rule(is_left_out=lambda tool: True),
    },
    told="must be a function's; the server calls no tools",
)
_CHOICE = one_of(
    {
        "function": fields_of(type=ANY, function=needed(fields_of(name=needed(NAME)))),
        "allowed_tools": fields_of(
            type=ANY,
            allowed_tools=needed(
                closed(mode=only("auto", "required"), tools=needed(listed(OBJECT)))
            ),
        ),
    },
    names=("auto", "none", "required"),
)
JSON_SCHEMA = fields_of(name=TEXT, description=aside(), schema=ANY, strict=FLAG)

CHAT = {
    **_DRAWING,
    **CALLER,
    "model": ANY,
    "messages": needed(listed(_MESSAGE)),
    "thinking": closed(
        type=only("enabled", "disabled", "adaptive"),
        display=only("summarized"),
        budget_tokens=ANY,
    ),
    "enable_thinking": FLAG,
    "thinking_budget": ANY,
    "chat_template_kwargs": closed(
        thinking=FLAG,
        enable_thinking=FLAG,
        reasoning_effort=EFFORTS,
    ),
    "reasoning": closed(
        effort=EFFORTS,
        enabled=FLAG,
        max_tokens=ANY,
        exclude=only(False, told="reasoning is given as it is"),
        summary=NOTHING,
    ),
    "usage": closed(include=NOTHING),  # OpenRouter's; usage is counted anyway
    "include_reasoning": only(True, told="reasoning is given as it is"),
    "reasoning_effort": EFFORTS,
    "tools": listed(_TOOL),
    "tool_choice": _CHOICE,
    "parallel_tool_calls": only(True, False),
    "response_format": one_of(
        {
            "text": fields_of(type=ANY),
            "json_object": fields_of(type=ANY),
            "json_schema": fields_of(type=ANY, json_schema=needed(JSON_SCHEMA)),
        },
        names=(),
    ),
    "max_tokens": ANY,
    "max_completion_tokens": ANY,
    "n": ANY,
    "stop": ANY,
    "stream": ANY,
    "stream_options": _STREAM_OPTIONS,
    "logprobs": FLAG,
    "top_logprobs": ANY,
    "modalities": only(["text"]),
    "store": STORE,
    "functions": missing("use tools"),
    "function_call": missing("use tool_choice"),
    "audio": missing("answers are text"),
    "moderation": missing("there is no moderation"),
    "prediction": aside(),  # it would make the same answer faster
    "web_search_options": aside({}),
    "verbosity": VERBOSITY,
}
TOKENIZE = {"model": ANY, "prompt": ANY, "add_special_tokens": ANY}
DETOKENIZE = {"model": ANY, "tokens": ANY}
