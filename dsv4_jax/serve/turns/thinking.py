"""Whether and how hard a request wants the model to think, of all the ways in which it is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4_jax.serve.errors import refuse
from dsv4_jax.serve.fields import read_integer
from dsv4_jax.step.sampling import MAX_TOKENS

_LONG_BUDGET = 4096
"""Tokens; a budget below it is for little thinking."""


def settle_thinking(given: dict[str, Any], dialect_name: str) -> None:
    """Brings what a body says of thinking into the fields of its protocol that the library reads.

    A budget of tokens is an effort: a small one is `low`, others are `high`. It is no bound, and
    none is `max`, since agents send the largest budget that fits whatever they ask. Beside
    `adaptive`, with which some send 0, it says nothing.

    Args:
      given: fields that were checked; changed in place.
      dialect_name: chat, messages or responses.

    Raises:
      ApiError: a budget is no number of tokens, or two fields say different things.
    """
    if dialect_name == "chat":
        _settle_chat(given)
    elif dialect_name == "messages":
        thinking = given.get("thinking", {})
        budget = _take_budget(thinking, "thinking", "budget_tokens")
        if budget is not None and thinking.setdefault("type", "enabled") == "enabled":
            given["output_config"] = {"effort": budget} | given.get("output_config", {})


def _settle_chat(given: dict[str, Any]) -> None:
    kwargs = given.pop("chat_template_kwargs", {})
    router = given.pop("reasoning", {})
    given.pop("include_reasoning", None)
    thinking = given.get("thinking", {})
    budgets = [
        _take_budget(thinking, "thinking", "budget_tokens"),
        _take_budget(router, "reasoning", "max_tokens"),
        _take_budget(given, "", "thinking_budget"),
    ]
    kind = thinking.get("type")
    if kind == "adaptive":
        budgets[0] = None
    wants = _agreed(
        [
            ("thinking.type", None if kind is None else kind != "disabled"),
            ("enable_thinking", given.pop("enable_thinking", None)),
            ("chat_template_kwargs.thinking", kwargs.get("thinking")),
            ("chat_template_kwargs.enable_thinking", kwargs.get("enable_thinking")),
            ("reasoning.enabled", router.get("enabled")),
        ]
    )
    effort = _agreed(
        [
            ("reasoning_effort", given.get("reasoning_effort")),
            ("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort")),
            ("reasoning.effort", router.get("effort")),
        ]
    )
    budget = next((one for one in budgets if one is not None), None)
    if budget is not None and wants is not False:
        wants, effort = True, effort or budget
    if wants is not None:
        given["thinking"] = {"type": "enabled" if wants else "disabled"}
    else:
        given.pop("thinking", None)
    if effort is not None:
        given["reasoning_effort"] = effort


def _take_budget(fields: dict[str, Any], where: str, name: str) -> str | None:
    """The effort of a budget of tokens, which is taken out of its fields."""
    if name not in fields:
        return None
    prefix = where and f"{where}."
    budget = read_integer({prefix + name: fields[name]}, prefix + name, 0, MAX_TOKENS)
    del fields[name]
    return "low" if budget is not None and budget < _LONG_BUDGET else "high"


def _agreed(said: Sequence[tuple[str, Any]]) -> Any:
    """What all fields say that say something; None if none does."""
    found = [(name, value) for name, value in said if value is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            refuse(name, f"must say the same as {found[0][0]}")
    return found[0][1] if found else None


def clear_thinking(given: dict[str, Any]) -> None:
    """Obeys `context_management` of messages: earlier thinking is kept, or that of the last turns.

    A turn is what the assistant says between two things that the user says; results of tools are
    in the middle of one.

    Args:
      given: fields that were checked; changed in place.

    Raises:
      ApiError: what is to be kept is nothing that can be kept.
    """
    edits = given.pop("context_management", {}).get("edits", [])
    for number, edit in enumerate(edits if isinstance(edits, list) else [None]):
        name = f"context_management.edits[{number}]"
        if not isinstance(edit, dict):
            refuse(name, "must be an object")
        kept = _read_kept(edit.get("keep", {"type": "thinking_turns", "value": 1}), f"{name}.keep")
        if kept is not None and isinstance(given.get("messages"), list):
            given["messages"] = _keep_thinking(given["messages"], kept)


def _read_kept(keep: Any, name: str) -> int | None:
    """Turns of which thinking is kept; None is all."""
    if keep == "all" or keep == {"type": "all"}:
        return None
    if not isinstance(keep, dict) or keep.get("type") != "thinking_turns":
        refuse(name, 'must be "all" or {"type": "thinking_turns", "value": turns}')
    if "value" not in keep:
        refuse(f"{name}.value", "must be a number of turns")
    return read_integer({f"{name}.value": keep["value"]}, f"{name}.value", 1, MAX_TOKENS)


def _keep_thinking(messages: Sequence[Any], kept: int) -> list[Any]:
    """Messages without the thinking of all turns but the last ones that have some."""
    found, seen, has_some = [], 0, False
    for message in reversed(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), list | str):
            found.append(message)
            continue
        kinds = {
            part.get("type")
            for part in (message["content"] if isinstance(message["content"], list) else [])
            if isinstance(part, dict) and isinstance(part.get("type"), str)
        }
        if message.get("role") == "user" and kinds != {"tool_result"}:
            seen, has_some = seen + has_some, False
        elif message.get("role") == "assistant" and "thinking" in kinds:
            has_some = True
            if seen >= kept:
                content = [one for one in message["content"] if not _is_thinking(one)]
                message = message | {"content": content}
        found.append(message)
    return found[::-1]


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"
