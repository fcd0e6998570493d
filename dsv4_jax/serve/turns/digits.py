"""Digits: numbers of JSON that a double or 64 bits do not hold, kept as they were written.

`deepseek_recipe` reads numbers into 64 bits: it rounds what is longer, or refuses it, and writes
all in its own way. While it works, such a number is therefore a stand-in, a whole number of 18
random digits; wherever the library has written one, the number's own text is put back.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NoReturn

_LOW, _HIGH = -(2**63), 2**64 - 1
"""Whole numbers that the library holds."""

MAX_DIGITS = 4000
"""Of an int that Python makes of a text; its own limit is 4300."""

_STRING_OR_NUMBER = re.compile(
    r'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)|(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)', re.ASCII | re.DOTALL
)
"""A string that has no end goes up to that of the text, which takes one pass."""

_STAND_IN = re.compile(r"(?<!\d)\d{18}(?!\d)", re.ASCII)


class WrittenFloat(float):
    """A number of JSON that the library, or Python, would write in another way.

    Attributes:
      text: how it was written.
    """

    __slots__ = ("text",)
    text: str


def read_float(text: str) -> float:
    """A float, with its text where that may say more than its value; for `json.loads`."""
    value = float(text)
    return value if repr(value) == text and "e" not in text else _written(text)


def loads(text: str | bytes) -> Any:
    """JSON whose numbers `dumps` writes as they are in it."""
    return json.loads(text, parse_float=read_float, parse_int=_read_whole)


def _read_whole(text: str) -> int | float:
    return _written(text) if text == "-0" or len(text) > MAX_DIGITS else int(text)


def _written(text: str) -> WrittenFloat:
    written = WrittenFloat(text)
    written.text = text
    return written


def dumps(value: Any) -> str:
    """JSON of a value that may hold numbers of `loads`."""
    digits = Digits()
    return digits.restore(json.dumps(digits.hide(value)))


class Digits:
    """The stand-ins of one request."""

    def __init__(self) -> None:
        """None so far."""
        self._texts: dict[str, str] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._texts)

    def hide(self, value: Any) -> Any:
        """A JSON value with stand-ins; its lists and objects are copies."""
        if isinstance(value, dict):
            return {name: self.hide(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self.hide(one) for one in value]
        if isinstance(value, WrittenFloat):
            return self._stand_in(value.text)
        if type(value) is int and not _LOW <= value <= _HIGH:
            return self._stand_in(str(value))
        return value

    def hide_in(self, text: str) -> str:
        """A text of JSON with stand-ins; one that is no JSON as it is."""
        if all(map(_is_held, _STRING_OR_NUMBER.findall(text))) or not _is_json(text):
            return text
        return _STRING_OR_NUMBER.sub(
            lambda match: match[0] if _is_held(match[1]) else str(self._stand_in(match[1])), text
        )

    def restore(self, text: str) -> str:
        """A text in which numbers have their own digits again."""
        if not self._texts:
            return text
        return _STAND_IN.sub(lambda match: self._texts.get(match[0], match[0]), text)

    def _stand_in(self, text: str) -> int:
        number = 10**17 + secrets.randbelow(9 * 10**17)
        self._texts[str(number)] = text
        return number


def _is_held(number: str | None) -> bool:
    """Whether the library writes a number as it is; so too what is no number."""
    if not number:
        return True
    if number.lstrip("-").isdecimal():
        return number != "-0" and len(number) <= 20 and _LOW <= int(number) <= _HIGH
    return "e" not in number.lower() and repr(float(number)) == number


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def with_digits(turn: Any, digits: Digits) -> Any:
    """A turn whose calls have arguments, which are texts of JSON, that the library can read."""
    if not isinstance(turn, dict):
        return turn
    if isinstance(turn.get("arguments"), str):
        return turn | {"arguments": digits.hide_in(turn["arguments"])}
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        return turn
    return turn | {"tool_calls": [_with_function_digits(call, digits) for call in calls]}


def _with_function_digits(call: Any, digits: Digits) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return call | {"function": with_digits(function, digits)} if function else call
