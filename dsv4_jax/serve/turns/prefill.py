"""Prefill: a last message of the assistant that the answer goes on with.

In messages every last message of the assistant is one; in chat, one that says `prefix`. The prompt
ends with its text, or with its reasoning where it has no text, and the answer holds what follows.
Responses have none: an answer is a new item there.
"""

from __future__ import annotations

from typing import Any

import deepseek_recipe as recipe

from dsv4_jax.serve.dialects import CHAT, MESSAGES, Dialect
from dsv4_jax.serve.errors import refuse


def take_prefill(turns: list[Any], dialect: Dialect, where: str) -> tuple[list[Any], bool]:
    """The turns without what says that the last one is continued, and whether it is.

    Args:
      turns: of a body, perhaps wrong ones.
      dialect: its protocol.
      where: what errors call them.

    Raises:
      ApiError: another turn says so, or one that cannot be continued.
    """
    last, name = len(turns) - 1, f"{where}[{len(turns) - 1}]"
    kept = []
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and "prefix" in turn:
            _check_prefix(turn, f"{where}[{number}].prefix", dialect, is_last=number == last)
            turn = {key: value for key, value in turn.items() if key != "prefix"}
        kept.append(turn)
    turn = turns[-1] if turns else None
    if not isinstance(turn, dict) or turn.get("role") != "assistant":
        return kept, False
    if dialect is MESSAGES:
        if any(_kind_of(part) == "tool_use" for part in _content_of(turn)):
            refuse(f"{name}.content", "must hold no tool_use: its tool_result has to come after it")
    elif not turn.get("prefix"):
        return kept, False
    elif turn.get("tool_calls"):
        refuse(f"{name}.tool_calls", "must be absent from a message that is continued")
    if turn.get("content") in (None, []):
        kept[-1] = kept[-1] | {"content": ""}
    return kept, True


def _check_prefix(turn: dict[str, Any], name: str, dialect: Dialect, *, is_last: bool) -> None:
    says = turn["prefix"]
    if not isinstance(says, bool | None):
        refuse(name, "must be true or false")
    if says and dialect not in (CHAT, MESSAGES):
        refuse(name, "must be false: an answer is a new item")
    if says and not (is_last and turn.get("role") == "assistant"):
        refuse(name, "must be false but of the last message, where it is the assistant's")


def gives_reasoning(turn: dict[str, Any]) -> bool:
    """Whether a message of the assistant holds reasoning."""
    parts = (part.get("thinking") for part in _content_of(turn) if isinstance(part, dict))
    return bool(turn.get("reasoning_content") or any(parts))


def continued(message: recipe.Message) -> recipe.AssistantMessage:
    """A message that the prompt ends with, without an end."""
    return recipe.AssistantMessage(message.content, message.reasoning_content, prefix=True)


def initial_stage(message: recipe.Message, *, thinks: bool) -> recipe.ThinkingInitialStage | None:
    """Where the answer to a message that is continued begins.

    What follows a text begins with its white space, whether or not there was reasoning.
    """
    if message.content:
        return recipe.ThinkingInitialStage.ContentContinuation
    if not thinks:
        return None
    if message.reasoning_content:
        return recipe.ThinkingInitialStage.ReasoningContinuation
    return recipe.ThinkingInitialStage.ReasoningStart


def _content_of(turn: dict[str, Any]) -> list[Any]:
    content = turn.get("content")
    return content if isinstance(content, list) else []


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None
