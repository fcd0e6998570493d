"""Answers that depend on their requests alone: no chance, no clock, and no order of events.

What a step computes for a request is up to the engine: `batch --repeatable` builds one whose steps
all have one shape.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

_IDS = {"id", "call_id", "tool_use_id", "signature", "request_id"}
"""Fields that hold what is drawn at random, here or by the library that parses answers."""

_OF_OTHERS = {"input", "metadata", "tools", "text"}
"""Fields that hold what the model or the caller wrote, whose ids are their own."""

_TIMES = {"created", "created_at", "completed_at"}
_KIND = re.compile(r"batch_req_|(?:[A-Za-z]+[_-])?")
"""How an id begins, which says what it is of."""

_ID_CHARS = 24


class FileOrder:
    """Lets answers of lines be written in the order of the lines, whoever is done first."""

    def __init__(self) -> None:
        """Begins with the first line."""
        self._written = 0
        self._changed = asyncio.Condition()

    async def wait_for(self, line_number: int) -> None:
        """Returns when the answers of the lines before that one, from 0, are written."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._written == line_number)

    async def note_written(self) -> None:
        """Says that the answer whose turn it was is written."""
        async with self._changed:
            self._written += 1
            self._changed.notify_all()


def seed_of(name: str | int) -> int:
    """The seed of a line whose request has none, by what the line is called."""
    return int.from_bytes(_digest(name, 0)[:4], "little") >> 1


def settle(answer: dict[str, Any], name: str | int) -> None:
    """Gives an answer ids by what its line is called, which are as unique, and 0 as its times."""
    numbers = itertools.count(1)
    ids: dict[str, str] = {}
    for part in _objects(answer):
        for field, value in part.items():
            if field in _TIMES and isinstance(value, int | float):
                part[field] = 0
            elif field in _IDS and isinstance(value, str) and value:
                if value not in ids:
                    kind = _KIND.match(value)
                    assert kind is not None
                    ids[value] = kind[0] + _digest(name, next(numbers)).hex()[:_ID_CHARS]
                part[field] = ids[value]


def _digest(name: str | int, number: int) -> bytes:
    return hashlib.sha256(f"{type(name).__name__} {name} {number}".encode()).digest()


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object of an answer that says something of the answer itself."""
    if isinstance(value, list):
        for inner in value:
            yield from _objects(inner)
    elif isinstance(value, dict):
        yield value
        for field, inner in value.items():
            if field not in _OF_OTHERS:
                yield from _objects(inner)
