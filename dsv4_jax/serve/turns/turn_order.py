"""Turn order: the results of calls come right after them, whatever was said in between.

The library takes a call and its results as one turn that nothing interrupts. Agents put messages
between them, such as what a hook of theirs says while a tool runs: these come after the results.
What is wrong without regard to order, such as a call that has no result, is the library's to say.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

from dsv4_jax.serve.dialects import CHAT, MESSAGES, Dialect


def in_order(turns: list[Any], dialect: Dialect) -> list[Any]:
    """The turns of a body, perhaps wrong ones, which stay as they are."""
    if not all(isinstance(turn, dict) for turn in turns):
        return turns
    if dialect is CHAT:
        return _order_chat(turns)
    return _order_messages(turns) if dialect is MESSAGES else _order_items(turns)


def _order_chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat: results are brought forward to their calls."""
    called = [_names([one], "tool_call_id") if one.get("role") == "tool" else set()
              for one in messages]  # fmt: skip
    places = {name: deque[int]() for names in called for name in names}
    for index, names in enumerate(called):
        for name in names:
            places[name].append(index)
    ordered: list[dict[str, Any]] = []
    taken: set[int] = set()
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        for name in called[index]:
            places[name].popleft()
        if index in taken:
            continue
        if waiting and not called[index]:
            later = sorted(places[name][0] for name in waiting if places.get(name))
            ordered += [messages[one] for one in later if one not in taken]
            taken.update(later)
            waiting = set()
        waiting -= called[index]
        ordered.append(message)
        if message.get("role") == "assistant":
            waiting = _names(_parts(message, "tool_calls"), "id")
    return ordered


def _order_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages: results are one message, before the text of the user's that come with them."""
    ordered: list[dict[str, Any]] = []
    results: list[Any] = []
    rest: list[Any] = []
    held: list[dict[str, Any]] = []
    waiting: set[str] = set()

    def close() -> None:
        if results or rest:
            ordered.append({"role": "user", "content": [*results, *rest]})
        ordered.extend(held)
        for part in (results, rest, held, waiting):
            part.clear()

    for message in messages:
        role = message.get("role")
        if waiting and role == "system":
            held.append(message)
        elif waiting and role == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            for part in parts:
                (results if _is_of(part, "tool_result") else rest).append(part)
            waiting -= _names(parts, "tool_use_id")
        else:
            close()
            parts = _parts(message, "content") if role == "assistant" else []
            calls = [one for one in parts if _is_of(one, "tool_use")]
            if calls:  # what is said comes before them in an answer of V4
                spoken = [one for one in parts if not _is_of(one, "tool_use")]
                message = message | {"content": [*spoken, *calls]}
            ordered.append(message)
            waiting = _names(calls, "id")
        if not waiting:
            close()
    close()
    return ordered


@dataclasses.dataclass
class _Turn:
    """Calls that have not all their results yet.

    Attributes:
      lead: what the model said between calls, which it did before all of them.
      calls: in their order.
      results: in theirs.
      held: messages of others.
      waiting: calls without a result.
    """

    lead: list[Any] = dataclasses.field(default_factory=list)
    calls: list[Any] = dataclasses.field(default_factory=list)
    results: list[Any] = dataclasses.field(default_factory=list)
    held: list[Any] = dataclasses.field(default_factory=list)
    waiting: set[str] = dataclasses.field(default_factory=set)

    @property
    def items(self) -> list[Any]:
        return [*self.lead, *self.calls, *self.results, *self.held]


def _order_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Responses: results are brought forward to their calls; messages come after both."""
    places: dict[str, int] = {}
    for index, item in enumerate(items):
        if _has_result(item):
            for name in _names([item], "call_id"):
                places.setdefault(name, index)
    ordered: list[dict[str, Any]] = []
    taken: set[int] = set()
    turn: _Turn | None = None
    for index, item in enumerate(items):
        if index in taken:
            continue
        names = _names([item], "call_id")
        if str(item.get("type")).endswith("_call"):
            turn = turn or _Turn()
            turn.calls.append(item)
            turn.waiting |= names
        elif turn is None:
            ordered.append(item)
        elif _has_result(item):
            turn.results.append(item)
            turn.waiting -= names
        elif not (_is_of(item, "reasoning") or item.get("role") == "assistant"):
            turn.held.append(item)
        elif not turn.results:
            turn.lead.append(item)
        else:  # the model goes on while a call still runs
            later = sorted(places[name] for name in turn.waiting if places.get(name, -1) > index)
            taken.update(later)
            turn.results += [items[one] for one in later]
            ordered += [*turn.items, item]
            turn = None
        if turn is not None and not turn.waiting:
            ordered += turn.items
            turn = None
    return ordered if turn is None else ordered + turn.items


def _has_result(item: dict[str, Any]) -> bool:
    return str(item.get("type")).endswith("_call_output")


def _is_of(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def _parts(turn: dict[str, Any], name: str) -> list[Any]:
    found = turn.get(name)
    return found if isinstance(found, list) else []


def _names(parts: Iterable[Any], name: str) -> set[str]:
    """The texts of a field, of those parts that have one."""
    found = (part.get(name) for part in parts if isinstance(part, dict))
    return {one for one in found if isinstance(one, str)}
