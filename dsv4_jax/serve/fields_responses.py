"""The fields of `/v1/responses`."""

from __future__ import annotations

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
from dsv4_jax.serve.fields_openai import (
    CACHE_HINTS,
    CALLER,
    DRAWING_EXTRAS,
    EFFORTS,
    FUNCTION,
    IGNORED_FLAG,
    STORE,
    VERBOSITY,
    is_not_for_the_model,
)

_NO_STORE = "answers are not stored"
_TEXTS = "the model reads text"
_LEFT_OUT = Rule(is_left_out=lambda value: True)

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
"""Every reasoning item has its encrypted content, and there are no calls of the server's tools."""

_TEXT_KINDS: dict[str | None, Rule] = {
    "input_text": fields_of(type=ANY, text=needed(TEXT), **CACHE_HINTS),
    "output_text": fields_of(
        type=ANY, text=needed(TEXT), annotations=NOTHING, logprobs=NOTHING, **CACHE_HINTS
    ),
    "refusal": fields_of(type=ANY, refusal=needed(TEXT)),
    "reasoning_text": fields_of(type=ANY, text=needed(TEXT)),
    "summary_text": fields_of(type=ANY, text=needed(TEXT)),
}
_PART = one_of(_TEXT_KINDS, told=_TEXTS)
_CONTENT = text_or(_PART)
_THOUGHTS = listed(one_of({None: fields_of(text=needed(TEXT)), **_TEXT_KINDS}, told=_TEXTS))
_ITEM = {"type": ANY, "id": NOTHING, "status": NOTHING, **CACHE_HINTS}
_CALL = {
    "call_id": needed(TEXT),
    "name": needed(TEXT),
    "namespace": TEXT,
    "caller": NOTHING,
    "async": aside(False),
}
_RESULT = _CALL | {"name": TEXT, "output": _CONTENT}
_MESSAGE_FIELDS = {"role": ANY, "content": _CONTENT, "phase": aside(), "prefix": ANY, **_ITEM}
_SPOKEN = Rule(fields=_MESSAGE_FIELDS | {"content": needed(_CONTENT)})
_MESSAGE = one_of(
    {
        **dict.fromkeys(("system", "developer", "user"), _SPOKEN),
        "assistant": Rule(fields=_MESSAGE_FIELDS),
    },
    field="role",
)
ITEM = one_of(
    {
        None: _MESSAGE,
        "message": _MESSAGE,
        "reasoning": fields_of(summary=NOTHING, content=_THOUGHTS, encrypted_content=TEXT, **_ITEM),
        "function_call": fields_of(arguments=TEXT, **_ITEM, **_CALL),
        "function_call_output": fields_of(**_ITEM, **_RESULT),
        "custom_tool_call": fields_of(input=needed(TEXT), **_ITEM, **_CALL),
        "custom_tool_call_output": fields_of(**_ITEM, **_RESULT),
        "web_search_call": _LEFT_OUT,  # it says what was searched for, and not what was found
    },
    told=_TEXTS,
)

_FUNCTION_TOOL = Rule(
    fields={
        **(FUNCTION.fields or {}),
        "type": ANY,
        "async": aside(False),
        "allowed_callers": NOTHING,
    },
    is_left_out=is_not_for_the_model,
)
_CUSTOM_TOOL = Rule(
    fields={
        "type": ANY,
        "name": needed(NAME),
        "description": TEXT,
        "format": one_of({"text": NOTHING, "grammar": _LEFT_OUT}),
        "async": aside(False),
        "defer_loading": aside(False),
        "allowed_callers": NOTHING,
        **CACHE_HINTS,
    },
    is_left_out=lambda tool: tool.get("name") != "apply_patch" or is_not_for_the_model(tool),
)
"""The library renders and parses the one free-form tool that agents send."""

_HOSTED = (
    *("file_search", "computer", "computer_use", "computer_use_preview", "web_search"),
    *("web_search_preview", "mcp", "code_interpreter", "programmatic_tool_calling"),
    *("image_generation", "local_shell", "shell", "tool_search", "apply_patch"),
)
_TOOL = one_of(
    {
        "function": _FUNCTION_TOOL,
        "custom": _CUSTOM_TOOL,
        "namespace": fields_of(
            type=ANY,
            name=needed(NAME),
            description=TEXT,
            tools=needed(listed(one_of({"function": _FUNCTION_TOOL, "custom": _LEFT_OUT}))),
        ),
        **dict.fromkeys(_HOSTED, _LEFT_OUT),
    },
    told="must be a function's; the server calls no tools",
)

RESPONSES = {
    **DRAWING_EXTRAS,
    **CALLER,
    "model": ANY,
    "input": text_or(ITEM),
    "instructions": TEXT,
    "reasoning": closed(
        effort=EFFORTS,
        summary=NOTHING,
        generate_summary=NOTHING,
        context=only("auto", told="earlier reasoning is rendered as the model has learned it"),
        mode=only("standard"),
    ),
    "tools": listed(_TOOL),
    "tool_choice": one_of(
        {
            "function": fields_of(type=ANY, name=needed(NAME)),
            "allowed_tools": closed(
                type=ANY, mode=only("auto", "required"), tools=needed(listed(OBJECT))
            ),
        },
        names=("auto", "none", "required"),
    ),
    "parallel_tool_calls": only(True, False),
    "text": closed(
        format=one_of(
            {
                "text": fields_of(type=ANY),
                "json_object": fields_of(type=ANY),
                "json_schema": fields_of(
                    type=ANY,
                    name=needed(TEXT),
                    description=aside(),
                    schema=needed(ANY),
                    strict=FLAG,
                ),
            },
            names=(),
        ),
        verbosity=VERBOSITY,
    ),
    "max_output_tokens": ANY,
    "temperature": ANY,
    "top_p": ANY,
    "stream": ANY,
    "top_logprobs": ANY,
    "user": ANY,
    "include": Rule(
        accepts=lambda value: (
            isinstance(value, list)
            and all(isinstance(one, str) and one in _INCLUDED for one in value)
        ),
        told=f"must be a list of some of {sorted(_INCLUDED)}",
    ),
    "store": STORE,
    "background": only(False, told=_NO_STORE),
    "background_options": missing(_NO_STORE),
    "truncation": only("disabled", "auto"),
    "previous_response_id": missing(_NO_STORE),
    "conversation": missing(_NO_STORE),
    "prompt": missing(_NO_STORE),
    "context_management": missing("conversations are taken as they are"),
    "max_tool_calls": NOTHING,  # of the server's tools, of which none is called
    "access_programs": missing("there are no such programs"),
    "image": NOTHING,  # how images are read, of which there are none
    "moderation": missing("there is no moderation"),
    "stream_options": closed(include_obfuscation=IGNORED_FLAG),
}
