"""Dialects: the three protocols of conversations that `deepseek_recipe` reads and writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from dsv4_jax.serve.drawing import DRAWN
from dsv4_jax.serve.errors import ApiError, refuse
from dsv4_jax.serve.fields import Rule, check_fields
from dsv4_jax.serve.fields_messages import MESSAGES as _MESSAGES
from dsv4_jax.serve.fields_openai import CHAT as _CHAT
from dsv4_jax.serve.fields_responses import LOGPROBS
from dsv4_jax.serve.fields_responses import RESPONSES as _RESPONSES
from dsv4_jax.serve.tools import allow_tools, check_tools
from dsv4_jax.serve.turns.earlier_turns import settle_turns
from dsv4_jax.serve.turns.thinking import clear_thinking, settle_thinking
from dsv4_jax.serving.requests.text import is_panic


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
      turns: its field for the conversation.
      form: its field for the form of an answer.
    """

    name: str
    rules: Mapping[str, Rule]
    request_class: Any
    response_class: Any
    id_prefix: str
    max_tokens: str
    stops: str
    turns: str
    form: str


CHAT = Dialect(
    "chat",
    _CHAT,
    recipe.ChatCompletionRequest,
    recipe.ChatCompletionResponse,
    "chatcmpl-",
    "max_tokens",
    "stop",
    "messages",
    "response_format",
)
RESPONSES = Dialect(
    "responses",
    _RESPONSES,
    recipe.ResponsesRequest,
    recipe.ResponsesResponse,
    "resp_",
    "max_output_tokens",
    "",
    "input",
    "text.format",
)
MESSAGES = Dialect(
    "messages",
    _MESSAGES,
    recipe.MessagesRequest,
    recipe.MessagesResponse,
    "msg_",
    "max_tokens",
    "stop_sequences",
    "messages",
    "output_config.format",
)

_OWN = (
    *(name for name in DRAWN if name not in ("temperature", "top_p")),
    "ignore_eos",
    "n",
    "max_completion_tokens",
)
"""Fields that are not the library's to read."""

_SILENT = {"thinking": {"type": "disabled"}}


def check_dialect(
    body: Mapping[str, Any],
    dialect: Dialect,
    *,
    max_tools: int,
    left_out: list[str] | None = None,
) -> dict[str, Any]:
    """The fields of a body that ask for something, each under one name.

    Args:
      body: what came.
      dialect: its protocol.
      max_tools: most tools.
      left_out: is added the names of what the model is asked without.

    Raises:
      ApiError: one is unknown, or asks for what is not here.
    """
    given = check_fields(body, dialect.rules, left_out)
    settle_turns(given, dialect.name)
    settle_thinking(given, dialect.name)
    if dialect is MESSAGES:
        clear_thinking(given)
        _settle_format(given)
    if "include" in given:
        given["include"] = [one for one in given["include"] if one == LOGPROBS]
    check_tools(given, max_tools)
    allow_tools(given)
    longer = given.pop("max_completion_tokens", None)
    if longer is not None and given.setdefault("max_tokens", longer) != longer:
        refuse("max_completion_tokens", "must be max_tokens where both are given")
    return given


def _settle_format(given: dict[str, Any]) -> None:
    """The form of an answer under the newer of its two names."""
    older = given.pop("output_format", None)
    if older is not None:
        config = given.setdefault("output_config", {})
        if config.setdefault("format", older) != older:
            refuse("output_format", "must be output_config.format where both are given")


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
        body["tools"] = [_plain_tool(tool) for tool in body["tools"]]
    if (schema := _named_schema(body.get("response_format"))) is not None:
        format_ = body["response_format"]
        body["response_format"] = format_ | {"json_schema": _drop_strict(schema)}
    text = body.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        body["text"] = text | {"format": _drop_strict(text["format"])}
    return body


def _plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _plain_function(tool["function"])}
    if tool.get("type") == "namespace":
        return {**tool, "tools": [_plain_function(one) for one in tool.get("tools", [])]}
    return _plain_function(tool)


def _plain_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function that promises nothing, and whose arguments are said to be an object, as all are.

    The library refuses schemas that do not say it themselves, such as {} or one "$ref".
    """
    made = _drop_strict(function)
    for name in ("parameters", "input_schema"):
        schema = made.get(name)
        if isinstance(schema, dict):
            kinds = ["object"] if schema.get("type") is None else schema["type"]
            if isinstance(kinds, list) and "object" in kinds:
                made[name] = {**schema, "type": "object"}
    return made


def _drop_strict(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "strict"}


def _named_schema(response_format: Any) -> dict[str, Any] | None:
    found = response_format.get("json_schema") if isinstance(response_format, dict) else None
    return found if isinstance(found, dict) else None


def is_schema_strict(given: Mapping[str, Any]) -> bool:
    """Whether the schema of an answer, of fields that were checked, says `strict`."""
    part = _named_schema(given.get("response_format")) or given.get("text", {}).get("format", {})
    return bool(part.get("strict"))


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
        return _ask_library(body, dialect, options)
    except BaseException as error:
        told, status = _told_by(error)
        where = _find_refused(body, dialect, options)
        raise ApiError(status, f"{where}: {told}", param=where) from None


def _ask_library(
    body: Mapping[str, Any], dialect: Dialect, options: recipe.ConversionOptions
) -> tuple[recipe.ConversationRequest, recipe.ResponsesEcho | None]:
    echo = dialect.request_class(body).echo() if dialect is RESPONSES else None
    return dialect.request_class(_without_strict(body)).convert(options), echo


def _told_by(error: BaseException) -> tuple[str, int]:
    """What the library says of a body that it refuses, and the status that is for it.

    What it cannot parse is a ValueError; a panic is no Exception. Others are raised again.
    """
    if isinstance(error, recipe.ConversionError):
        return _message_of(error.body), error.status_code
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    return str(error)[:300], 400


def _find_refused(
    body: Mapping[str, Any], dialect: Dialect, options: recipe.ConversionOptions
) -> str:
    """The field for which the library refuses a body, of which it says nothing.

    It is asked with a short conversation and one field more each time, a choice of tools at last.
    """
    least = {"model": body["model"], dialect.turns: [{"role": "user", "content": "hi"}]}
    if dialect is MESSAGES:
        least["max_tokens"] = 1
    for number, tool in enumerate(body.get("tools", ())):
        if not _takes(least | {"tools": [tool]}, dialect, options):
            return f"tools[{number}]"
    for name in sorted(body, key=lambda name: name == "tool_choice"):
        if name != dialect.turns:
            least[name] = body[name]
            if not _takes(least, dialect, options):
                return name
    return dialect.turns


def _takes(body: Mapping[str, Any], dialect: Dialect, options: recipe.ConversionOptions) -> bool:
    try:
        _ask_library(body, dialect, options)
    except BaseException as error:
        _told_by(error)
        return False
    return True


def _message_of(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300]
