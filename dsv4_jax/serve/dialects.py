"""Dialects: the three protocols of conversations that `deepseek_recipe` reads and writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from dsv4_jax.serve import fields
from dsv4_jax.serve.errors import ApiError, refuse
from dsv4_jax.serve.fields import Rule, check_inner, missing, only


@dataclasses.dataclass(frozen=True)
class Dialect:
    """One protocol.

    Attributes:
      name: for log lines.
      rules: its fields.
      request_class: reads a body.
      response_class: gathers events to a whole answer.
      id_prefix: of answers' ids.
      max_tokens: its field for the most tokens to draw.
      stops: its field for stop texts; "" if it has none.
      turns: its field for the turns of a conversation.
      parts: kinds of what a turn may hold.
    """

    name: str
    rules: Mapping[str, Rule]
    request_class: Any
    response_class: Any
    id_prefix: str
    max_tokens: str
    stops: str
    turns: str
    parts: tuple[str | None, ...]


CHAT = Dialect(
    "chat",
    fields.CHAT,
    recipe.ChatCompletionRequest,
    recipe.ChatCompletionResponse,
    "chatcmpl-",
    "max_tokens",
    "stop",
    "messages",
    (None, "text", "refusal"),
)
RESPONSES = Dialect(
    "responses",
    fields.RESPONSES,
    recipe.ResponsesRequest,
    recipe.ResponsesResponse,
    "resp_",
    "max_output_tokens",
    "",
    "input",
    (
        *(None, "message", "function_call", "function_call_output", "reasoning"),
        *("input_text", "output_text", "refusal", "reasoning_text", "summary_text"),
    ),
)
MESSAGES = Dialect(
    "messages",
    fields.MESSAGES,
    recipe.MessagesRequest,
    recipe.MessagesResponse,
    "msg_",
    "max_tokens",
    "stop_sequences",
    "messages",
    (None, "text", "thinking", "tool_use", "tool_result"),
)

_OWN = (
    "seed",
    "top_k",
    "min_p",
    "ignore_eos",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "max_completion_tokens",
)
"""Fields that are not the library's to read."""

_ANY = fields.ANY
_SILENT = {"thinking": {"type": "disabled"}}
_EFFORTS = only("none", "minimal", "low", "medium", "high", "xhigh", "max")
_INNER = {
    "thinking": {
        "type": only("enabled", "disabled", "adaptive"),
        "display": only("summarized"),
        "budget_tokens": missing('thinking has no budget here; use {"type": "adaptive"}'),
    },
    "reasoning": {
        "effort": _EFFORTS,
        "summary": missing("reasoning is not summarised, but given as it is"),
        "generate_summary": missing("reasoning is not summarised, but given as it is"),
    },
    "output_config": {
        "effort": _EFFORTS,
        "format": missing("use /v1/chat/completions for JSON schemas"),
    },
    "text": {
        "format": fields.typed("text", "json_object", "json_schema"),
        "verbosity": missing("the model knows no verbosity"),
    },
}
_TOOL_KINDS = {"chat": ("function",), "responses": ("function",), "messages": (None, "custom")}


def check_dialect(body: Mapping[str, Any], dialect: Dialect, *, max_tools: int) -> dict[str, Any]:
    """The fields of a body that are not null, `max_tokens` under its one name.

    Raises:
      ApiError: one is unknown, or asks for what is not here.
    """
    given = fields.check_fields(body, dialect.rules)
    for name, rules in _INNER.items():
        if name in given:
            given[name] = check_inner(given[name], name, rules)
    if "reasoning_effort" in given and not _EFFORTS.accepts(given["reasoning_effort"]):
        refuse("reasoning_effort", _EFFORTS.told)
    _check_tools(given.get("tools", []), dialect, max_tools)
    _check_parts(given.get(dialect.turns), dialect, dialect.turns)
    longer = given.get("max_completion_tokens")
    if longer is not None and given.setdefault("max_tokens", longer) != longer:
        refuse("max_completion_tokens", "must be max_tokens where both are given")
    return given


def _check_tools(tools: Any, dialect: Dialect, max_tools: int) -> None:
    if not isinstance(tools, list) or len(tools) > max_tools:
        refuse("tools", f"must be a list of at most {max_tools}")
    for number, tool in enumerate(tools):
        name = f"tools[{number}]"
        if not isinstance(tool, dict):
            refuse(name, "must be an object")
        if tool.get("type") not in _TOOL_KINDS[dialect.name]:
            refuse(f"{name}.type", "must be a function's; the server calls no tools")
        inner = tool.get("function", tool)
        if isinstance(inner, dict) and not isinstance(inner.get("strict", False), bool | None):
            refuse(f"{name}.strict", "must be true or false")
        if isinstance(inner, dict) and inner.get("defer_loading"):
            refuse(f"{name}.defer_loading", "must be false; all tools are loaded")


def _check_parts(turns: Any, dialect: Dialect, name: str) -> None:
    """Refuses images, files and the like, which the library would only mention in the prompt."""
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        if not isinstance(turn, dict):
            continue
        where = f"{name}[{number}]"
        if turn.get("type") not in dialect.parts:
            refuse(where, f"{json.dumps(turn['type'])[:64]} is not supported: the model reads text")
        for inner in ("content", "output"):
            _check_parts(turn.get(inner), dialect, f"{where}.{inner}")


def _with_system(messages: Any) -> Any:
    """Messages in which developers are the system, as they were called before."""
    if not isinstance(messages, list):
        return messages
    is_theirs = [isinstance(one, dict) and one.get("role") == "developer" for one in messages]
    return [
        one | {"role": "system"} if theirs else one
        for one, theirs in zip(messages, is_theirs, strict=True)
    ]


def _without_strict(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body that promises nothing: the library would drop parts of schemas that are strict."""
    body = dict(body)
    if isinstance(body.get("tools"), list):
        body["tools"] = [
            tool | {"function": _drop_strict(tool["function"])}
            if isinstance(tool.get("function"), dict)
            else _drop_strict(tool)
            for tool in body["tools"]
        ]
    if (schema := _named_schema(body.get("response_format"))) is not None:
        format_ = body["response_format"]
        body["response_format"] = format_ | {"json_schema": _drop_strict(schema)}
    text = body.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        body["text"] = text | {"format": _drop_strict(text["format"])}
    return body


def _drop_strict(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "strict"}


def _named_schema(response_format: Any) -> dict[str, Any] | None:
    found = response_format.get("json_schema") if isinstance(response_format, dict) else None
    return found if isinstance(found, dict) else None


def strict_tools(given: Mapping[str, Any]) -> set[str]:
    """Names of the tools whose calls have to be of their schema."""
    functions = [tool.get("function", tool) for tool in given.get("tools", [])]
    return {one["name"] for one in functions if one.get("strict")}


def is_schema_strict(given: Mapping[str, Any]) -> bool:
    """Whether the schema of an answer says `strict`.

    Raises:
      ApiError: it says neither true nor false.
    """
    part = _named_schema(given.get("response_format")) or given.get("text", {}).get("format")
    strict = part.get("strict") if isinstance(part, dict) else None
    if not isinstance(strict, bool | None):
        refuse("strict", "must be true or false")
    return bool(strict)


def must_call(given: Mapping[str, Any]) -> bool:
    """A tool has to be called."""
    choice = given.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind in ("required", "function", "any", "tool")


def convert(
    given: Mapping[str, Any], dialect: Dialect, options: recipe.ConversionOptions
) -> tuple[recipe.ConversationRequest, recipe.ResponsesEcho | None]:
    """A conversation, and what its answer repeats of the request.

    Raises:
      ApiError: the library refuses it.
    """
    body = {name: value for name, value in given.items() if name not in _OWN}
    if must_call(given) and not {"thinking", "reasoning_effort", "reasoning"} & set(body):
        # The library knows no reasoning before a call that must come.
        body |= {"reasoning": {"effort": "none"}} if dialect is RESPONSES else _SILENT
    if dialect is CHAT and "messages" in body:
        body["messages"] = _with_system(body["messages"])
    try:
        echo = dialect.request_class(body).echo() if dialect is RESPONSES else None
        return dialect.request_class(_without_strict(body)).convert(options), echo
    except recipe.ConversionError as error:
        raise ApiError(error.status_code, _message_of(error.body)) from None
    except BaseException as error:
        # What it cannot parse is a ValueError; a panic is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ApiError(400, f"the body is no {dialect.name} request: {str(error)[:300]}") from None


def _message_of(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300]
