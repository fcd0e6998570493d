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


def refuse(pointer: str, rule: str) -> NoReturn:
    """Says what a schema must be at a place."""
    raise SchemaError(f"{pointer[:200]} {rule}")


_MOST_PLACES = 9
"""Digits behind the point of the bound that takes the place of a whole one."""


def keep_out_whole_bounds(made: dict[str, Any], where: str) -> None:
    """Replaces bounds that exclude a whole number by those that include the next one beyond it.

    llguidance takes 3 for a number above 3 and below 3.27, and so it does from 0 on, and below
    zero. It joins bounds of several schemas itself, so that each is replaced wherever it stands.
    The next whole number is exact; of other numbers those within 10^-9 of the bound are lost, or
    within the last of 15 digits where the bound is large.

    Args:
      made: a schema as it was read; its bounds are changed.
      where: its place, for errors.

    Raises:
      SchemaError: a double does not hold the number beyond the bound.
    """
    for sign, excluded, included in (
        (1, "exclusiveMinimum", "minimum"),
        (-1, "exclusiveMaximum", "maximum"),
    ):
        bound = made.get(excluded)
        if bound is None or bound != int(bound) or sign * bound < 0:
            continue
        places = min(_MOST_PLACES, MAX_DIGITS - len(str(abs(int(bound)))))
        step = 1 if places <= 0 or made.get("type") == "integer" else 10.0**-places
        beyond = int(bound) + sign * step
        if is_rounded(beyond):
            refuse(where, f"must have a bound nearer to 0 than {excluded}={bound}")
        del made[excluded]
        made[included] = sign * max(sign * beyond, sign * made.get(included, beyond))
