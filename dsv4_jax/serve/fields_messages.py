"""The fields of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from dsv4_jax.serve.fields import (
    ANY,
    FLAG,
    NAME,
    NOTHING,
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
from dsv4_jax.serve.fields_openai import (
    CACHE_HINTS,
    CALLER,
    DRAWING_EXTRAS,
    EFFORTS,
    is_not_for_the_model,
)

_TEXTS = "the model reads text"
_LEFT_OUT = Rule(is_left_out=lambda value: True)
_TOOLSET = missing("tools stand by themselves")

_TEXT_PART = fields_of(type=ANY, text=needed(TEXT), citations=NOTHING, **CACHE_HINTS)
_RESULT_PART = one_of(
    {
        "text": _TEXT_PART,
        "tool_reference": fields_of(type=ANY, tool_name=needed(TEXT), **CACHE_HINTS),
    },
    told=_TEXTS,
)
_PART = one_of(
    {
        "text": _TEXT_PART,
        "thinking": fields_of(type=ANY, thinking=needed(TEXT), signature=TEXT, **CACHE_HINTS),
        "redacted_thinking": _LEFT_OUT,  # nobody but who wrote it can read it
        "tool_use": fields_of(
            type=ANY,
            id=needed(TEXT),
            name=needed(TEXT),
            input=Rule(null=dict),
            caller=NOTHING,
            toolset_name=_TOOLSET,
            **CACHE_HINTS,
        ),
        "tool_result": fields_of(
            type=ANY,
            tool_use_id=needed(TEXT),
            content=text_or(_RESULT_PART),
            is_error=aside(False),  # what it says has to tell
            toolset_name=_TOOLSET,
            **CACHE_HINTS,
        ),
    },
    told=_TEXTS,
)
_MESSAGE_FIELDS = {
    "role": ANY,
    "content": text_or(_PART),
    "prefix": FLAG,
    "clear_at": only("never", told="conversations are taken as they are"),
    "output_config": missing("an effort is that of the whole request"),
    **CACHE_HINTS,
}
_SPOKEN = Rule(fields=_MESSAGE_FIELDS | {"content": needed(text_or(_PART))})
_MESSAGE = one_of(
    {
        "user": _SPOKEN,
        "assistant": Rule(fields=_MESSAGE_FIELDS),
        # One without content is there for its `output_config`.
        "system": Rule(
            fields=_MESSAGE_FIELDS,
            is_left_out=lambda value: not (value.get("content") or value.get("output_config")),
        ),
    },
    field="role",
)

_TOOL_FIELDS = Rule(
    fields={
        "type": NOTHING,
        "name": needed(NAME),
        "description": TEXT,
        "input_schema": needed(Rule(types=(dict,), null=lambda: {"type": "object"})),
        "strict": FLAG,
        "allowed_callers": NOTHING,
        "defer_loading": aside(False),
        "eager_input_streaming": NOTHING,  # arguments are streamed as they are drawn
        "input_examples": aside([]),
        **CACHE_HINTS,
    },
    is_left_out=is_not_for_the_model,
)
_HOSTED = (
    *("bash", "code_execution", "browser_toolset", "computer", "computer_toolset", "memory"),
    *("text_editor", "web_search", "web_fetch", "advisor", "mcp_toolset"),
    *("tool_search_tool_bm25", "tool_search_tool_regex"),
)
"""Tools of which the protocol says no more than a name, and some of which the server would run."""

_FORMAT = Rule(
    fields={"type": ANY, "schema": ANY, "name": NOTHING},
    is_closed=True,
    accepts=lambda value: (
        isinstance(value, dict)
        and value.get("type") == "json_schema"
        and isinstance(value.get("schema"), dict)
    ),
    told='must be {"type": "json_schema", "schema": ...}',
)
_SINGLE = {"type": ANY, "disable_parallel_tool_use": only(True, False)}
_SHOWN = {"display": only("summarized", told="reasoning is given as it is")}
_BOUND = {"block_binding": missing("earlier reasoning is not checked")}

MESSAGES = {
    **DRAWING_EXTRAS,
    **CALLER,
    "model": ANY,
    "messages": needed(listed(_MESSAGE)),
    "system": text_or(one_of({"text": _TEXT_PART}, told=_TEXTS)),
    "max_tokens": ANY,
    "stop_sequences": ANY,
    "temperature": ANY,
    "top_p": ANY,
    "stream": ANY,
    "thinking": closed(
        type=only("enabled", "disabled", "adaptive"),
        budget_tokens=ANY,
        **_SHOWN,
        **_BOUND,
    ),
    "output_config": closed(
        effort=EFFORTS,
        format=_FORMAT,
        task_budget=missing("nobody counts the tokens of a task"),
    ),
    "output_format": _FORMAT,
    "tools": listed(
        one_of(
            {
                None: _TOOL_FIELDS,
                "custom": _TOOL_FIELDS,
                **dict.fromkeys(_HOSTED, _LEFT_OUT),
            },
            told="must be one with an input_schema; the server calls no tools",
        )
    ),
    "tool_choice": one_of(
        {
            "auto": fields_of(**_SINGLE),
            "any": fields_of(**_SINGLE),
            "tool": fields_of(name=needed(NAME), **_SINGLE),
            "none": fields_of(**_SINGLE),
        },
        names=(),
    ),
    "context_management": closed(
        edits=listed(
            one_of(
                {"clear_thinking": closed(type=ANY, keep=ANY)},
                told="of context only thinking can be cleared",
            )
        ),
    ),
    "service_tier": aside(
        *("auto", "standard_only"),
        accepts=lambda value: value in ("auto", "standard_only"),
        told="must be 'auto' or 'standard_only'",
    ),
    "speed": aside(
        "standard",
        accepts=lambda value: value in ("standard", "fast"),
        told="must be 'standard' or 'fast'",
    ),
    "thread": missing(
        "conversations are not stored; send the whole conversation",
        error_code="thread_unsupported_request",
    ),
    "betas": NOTHING,
    "diagnostics": aside(),
    "user_profile_id": NOTHING,
    "workspace_id": NOTHING,
    "fallback_credit_token": NOTHING,
    "billing_policy": closed(type=NOTHING, bill_to=only("self")),
    "compaction": missing("conversations are taken as they are"),
    "container": missing("there are no containers"),
    "fallbacks": missing("there is one model"),
    "inference_geo": missing("there is one place"),
    "mcp_servers": missing("the server calls no tools"),
}
