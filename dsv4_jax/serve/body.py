"""Bodies: read within limits, and parsed into JSON that every later step can take."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from dsv4_jax.lines import without_mark
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.room import Share
from dsv4_jax.serve.turns.digits import MAX_DIGITS, read_float

MAX_PARTS = 2**17
"""Objects and lists of a body. Python's parser holds up all threads while it makes them."""

MAX_COMMAS = 2**20
"""Of a body, outside of texts; no prompt has more tokens."""

MAX_DEPTH = 200
"""Lists and objects inside each other. How many Python's parser takes depends on its version."""

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_UP_TO_BRACKET = re.compile(rb'(?:[^][{}"]++|%b){0,4096}+([][{}])?' % _TEXT.pattern, re.DOTALL)
"""Bounded, since other threads wait for each call of a regular expression."""


async def read_body(request: Request, *, max_bytes: int, timeout_s: float, share: Share) -> bytes:
    """The whole body.

    Args:
      request: whose body it is.
      max_bytes: the largest one.
      timeout_s: seconds in which it has to come.
      share: takes up its bytes.

    Raises:
      ApiError: it is too large, too slow, or no JSON by its own account, or there is no room.
      ClientDisconnect: it was cut off.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "content-type must be application/json")
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body must have at most {max_bytes} bytes")
    if not length.isdecimal() or len(length) > 15 or int(length) > max_bytes:
        raise too_large
    share.check(int(length))
    parts, total = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                total += len(part)
                if total > max_bytes:
                    raise too_large
                share.add(len(part))
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s") from None
    return b"".join(parts)


def parse_object(raw: bytes, name: str = "the body") -> dict[str, Any]:
    """A JSON object of finite numbers and of texts that UTF-8 can encode; errors call it so.

    Raises:
      ApiError: it is something else, nested too deep, or of too many values; it names the field or
        the byte that is wrong, where it is one.
    """
    _check_counts(raw, name)
    _check_depth(raw, name)
    refused: list[_Number] = []

    def refuse_number(told: str) -> _Number:
        refused.append(_Number(told))
        return refused[-1]

    def read_finite(text: str) -> Any:
        value = read_float(text)
        return value if math.isfinite(value) else refuse_number(f"{text[:40]} {_TOO_LARGE}")

    def read_whole(text: str) -> Any:
        if len(text) > MAX_DIGITS:
            return refuse_number(f"{text[:40]}... {_TOO_LARGE}")
        return int(text)

    try:
        value = json.loads(
            without_mark(raw).decode("utf-8"),
            parse_constant=lambda text: refuse_number(f"{text} is no number of JSON"),
            parse_float=read_finite,
            parse_int=read_whole,
        )
        if refused:
            where = _find(value, lambda one: one is refused[0])
            raise ApiError(400, f"{where or name}: {refused[0].told}", param=where or None)
        if b"\\u" in raw and _is_torn(json.dumps(value, ensure_ascii=False)):
            where = _find(value, _is_torn)
            told = f"{where or name}: holds half of a surrogate pair"
            raise ApiError(400, told, param=where or None)
    except UnicodeDecodeError as error:
        offset = error.start + len(raw) - len(without_mark(raw))
        raise ApiError(400, f"{name} must be UTF-8, which its byte {offset} is not") from None
    except ValueError as error:
        raise ApiError(400, f"{name} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be a JSON object")
    return value


_TOO_LARGE = "is too large a number"


def _check_counts(raw: bytes, name: str) -> None:
    """Refuses what would be too many values for one call of the parser."""
    if _num_parts(raw) <= MAX_PARTS and raw.count(b",") <= MAX_COMMAS:
        return
    position, parts, commas = 0, 0, 0  # again, without what is in texts
    for text in _TEXT.finditer(raw):
        between = raw[position : text.start()]
        parts, commas = parts + _num_parts(between), commas + between.count(b",")
        position = text.end()
        if parts > MAX_PARTS or commas > MAX_COMMAS:
            break
    parts, commas = parts + _num_parts(raw[position:]), commas + raw[position:].count(b",")
    if parts > MAX_PARTS:
        raise ApiError(400, f"{name} must have at most {MAX_PARTS} lists and objects")
    if commas > MAX_COMMAS:
        raise ApiError(400, f"{name} must have at most {MAX_COMMAS} values")


def _check_depth(raw: bytes, name: str) -> None:
    """Refuses lists and objects that lie too deep in each other."""
    if _num_parts(raw) <= MAX_DEPTH:
        return
    depth, position = 0, 0
    while position < len(raw):
        match = _UP_TO_BRACKET.match(raw, position)
        assert match is not None
        position, bracket = match.end(), match[1]
        if bracket is not None:
            depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"{name} is nested too deep: at most {MAX_DEPTH} lists and objects")


def _num_parts(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


@dataclasses.dataclass(frozen=True, eq=False)
class _Number:
    """Stands where a number is that later steps cannot take, and says why."""

    told: str


def _is_torn(value: Any) -> bool:
    """A text that UTF-8 cannot encode: half of a surrogate pair may have been escaped."""
    try:
        return isinstance(value, str) and not value.isascii() and not value.encode()
    except UnicodeEncodeError:
        return True


def _find(value: Any, is_it: Callable[[Any], bool], path: str = "") -> str | None:
    """Where the first value is that is looked for, or that has such a name; None if none is."""
    if is_it(value):
        return path
    parts: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(value, dict):
        lead = path and f"{path}."
        parts = ((name, one, f"{lead}{name[:64]}") for name, one in value.items())
    elif isinstance(value, list):
        parts = ((None, one, f"{path}[{number}]") for number, one in enumerate(value))
    for name, one, where in parts:
        found = path if is_it(name) else _find(one, is_it, where)
        if found is not None:
            return found
    return None


__all__ = ["ClientDisconnect", "parse_object", "read_body"]
