"""Texts, numbers and regular expressions in JSON schemas, and how a schema is refused."""

from __future__ import annotations

import decimal
import functools
import json
import re
from typing import Any, NoReturn

from dsv4_jax import checks
from dsv4_jax.schemas.time_limit import check_time

MAX_EXACT = 2**53
MAX_DIGITS = 15
MAX_MULTIPLE = 100_000
"""Of `multipleOf`: a grammar has a state for each remainder, of microseconds and 200 bytes."""


class SchemaError(ValueError):
    """A schema that cannot be held, with the place of what is wrong."""


def check_text(text: str, where: str) -> None:
    """Refuses characters that JSON spells by their code alone, which is left out of grammars."""
    if _UNWRITTEN.search(text):
        refuse(where, f"must be without control characters, got {checks.shown(text)}")


_UNWRITTEN = re.compile("[\\x00-\\x07\\x0b\\x0e-\\x1f\\x7f\ud800-\udfff]")


def is_rounded(value: Any) -> bool:
    """A number that llguidance may round, which reads floats and the last of their digits roughly.

    At -2^63 it ends the process.
    """
    if type(value) not in (int, float):
        return False
    digits = re.sub(r"e.*|[^0-9]", "", repr(value)).strip("0")
    return abs(value) > MAX_EXACT or (isinstance(value, float) and len(digits) > MAX_DIGITS)


def check_multiple(value: int | float, where: str) -> None:
    """Refuses a `multipleOf` with too many remainders, in units of its last digit."""
    number = decimal.Decimal(repr(value))
    units = number.scaleb(max(0, -int(number.normalize().as_tuple().exponent)))
    if not 0 < units <= MAX_MULTIPLE:
        refuse(where, f"must be above 0 and at most {MAX_MULTIPLE} units of its last digit, "
                      f"got {value}; use a greater unit, such as hours for seconds")  # fmt: skip


def check_value(value: Any, where: str) -> None:
    """Refuses texts that are not written, and numbers that are rounded, anywhere in a value."""
    if isinstance(value, dict | list):
        for one in value.items() if isinstance(value, dict) else value:
            check_value(list(one) if isinstance(one, tuple) else one, where)
    elif isinstance(value, str):
        check_text(value, where)
    elif is_rounded(value):
        refuse(where, f"must be without {value} inside other values: beyond 2^53 or 15 digits "
                      "it would be rounded; use texts")  # fmt: skip


@functools.lru_cache(1024)
def _obstacle(expression: str) -> str:
    """What llguidance says of a pattern; "" if it reads it."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        return ""
    schema = json.dumps({"type": "string", "pattern": expression})
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def expression(value: Any, where: str) -> str:
    """A regular expression that llguidance reads; the error has its place."""
    if not isinstance(value, str):
        refuse(where, "must be a text")
    check_time()
    if told := _obstacle(value):
        told = " ".join(told.split())[:200]
        refuse(where, f"must be a regular expression that can be held, got "
                       f"{checks.shown(value)}: {told}")  # fmt: skip
    return value


def refuse(place: str, rule: str) -> NoReturn:
    """Says what a schema must be at a place."""
    raise SchemaError(f"{place[:200]} {rule}")


_NEXT_TO_WHOLE = 1e-6
"""How far numbers stay from a whole bound that is excluded, where llguidance would take it."""


def keep_out_whole_bounds(made: dict[str, Any], where: str) -> None:
    """Moves an excluded bound beyond a whole number that llguidance would take.

    Of numbers above 3 and below 3.27 it takes 3, since both bounds begin with the same digits; so
    it does below zero. The numbers from 3.000001 on are left.

    Args:
      made: a schema as it was read; its bounds are changed.
      where: its place, for errors.

    Raises:
      SchemaError: a double does not hold the bound that is moved.
    """
    for sign, open_low, low, highs in (
        (1, "exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum")),
        (-1, "exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum")),
    ):
        bound = made.get(open_low)
        given = [sign * made[name] for name in highs if name in made]
        if bound is None or not given or sign * bound < 1 or bound != int(bound):
            continue
        if not sign * bound < min(given) < sign * bound + 1:
            continue
        moved = bound + sign * _NEXT_TO_WHOLE
        if moved == bound or is_rounded(moved):
            refuse(where, f"must have bounds that differ before the point, got {open_low}={bound}")
        del made[open_low]
        made[low] = sign * max(sign * moved, sign * made.get(low, moved))
