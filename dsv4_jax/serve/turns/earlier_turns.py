"""Earlier turns, in all the spellings in which clients give them back, as the library reads them.

A refusal is a text of the assistant; reasoning has two names; a call of no arguments, a result of
nothing and an answer without a word are written as null, as an empty text or list, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def settle_turns(given: dict[str, Any], dialect_name: str) -> None:
    """Brings the earlier turns of a body into the one spelling that the library reads.

    Args:
      given: fields that were checked; changed in place. What is wrong stays, for others to refuse.
      dialect_name: chat, messages or responses; of messages the library reads all spellings.
    """
    if dialect_name == "chat":
        _each(given, "messages", _settled_message)
    elif dialect_name == "responses":
        _each(given, "input", _settled_item)


def _settled_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a chat."""
    message = dict(message)
    if message.get("role") == "tool":
        message.setdefault("content", "")
    if message.get("role") != "assistant":
        return message
    if (reasoning := message.pop("reasoning", None)) is not None:
        message.setdefault("reasoning_content", reasoning)
    if isinstance(refusal := message.pop("refusal", None), str):
        message["content"] = [*_parts_of(message), {"type": "refusal", "refusal": refusal}]
    _each(message, "content", lambda part: _as_text(part, "refusal", "text"))
    _each(message, "tool_calls", _settled_call)
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "tool_calls" not in message:
        message.setdefault("content", "")
    return message


def _settled_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return call | {"function": _with_arguments(function)}


def _settled_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item of responses."""
    if str(item.get("type")).endswith("_call_output"):
        item = {"output": ""} | item
        _each(item, "output", lambda part: _as_text(part, "output_text", "input_text"))
    elif item.get("role") == "assistant":
        item = {"content": ""} | item
        _each(item, "content", lambda part: _as_text(part, "refusal", "output_text"))
    elif item.get("type") == "function_call":
        item = _with_arguments(item)
    return item


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, also where it has none."""
    arguments = call.get("arguments", "")
    is_none = isinstance(arguments, str) and arguments.strip() in ("", "null")
    return call | {"arguments": "{}"} if is_none else call


def _as_text(part: dict[str, Any], kind: str, text_kind: str) -> dict[str, Any]:
    """A part of one kind as a text of another one."""
    if part.get("type") != kind:
        return part
    return {"type": text_kind, "text": part.get("refusal", part.get("text"))}


def _parts_of(message: dict[str, Any]) -> list[Any]:
    content = message.get("content") or []
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _each(
    fields: dict[str, Any], name: str, settled: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Changes every object of a list that is a field."""
    if isinstance(fields.get(name), list):
        fields[name] = [settled(one) if isinstance(one, dict) else one for one in fields[name]]
