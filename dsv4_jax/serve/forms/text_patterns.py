"""Patterns of JSON schemas, which are found anywhere in a text, as expressions of whole texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from dsv4_jax.schemas.read_schema import SchemaError

_ASCII = {"\\d": "[0-9]", "\\D": "[^0-9]", "\\w": "[0-9A-Za-z_]", "\\W": "[^0-9A-Za-z_]"}
"""Classes that are of ASCII in schemas and of all letters in Lark."""

_ANCHORS = ("^", "$", "\\A", "\\z")


def found_in(pattern: str, pointer: str) -> str:
    """An expression, of Rust's dialect, of the texts in which a pattern is found.

    Raises:
      SchemaError: the pattern has flags, or anchors elsewhere than at its ends; the place is that
        of the schema.
    """
    made = []
    for steps in _alternatives(pattern):
        begins, ends = steps[:1] == ["^"], steps[-1:] == ["$"]
        inner = steps[begins : len(steps) - ends]
        made.append(f"{'' if begins else '(?s:.*)'}(?:{''.join(inner)}){'' if ends else '(?s:.*)'}")
        if any(step in _ANCHORS for step in inner) or re.search(r"\(\?[a-zA-Z-]+\)", pattern):
            raise SchemaError(
                f"{pointer}/pattern must have no flags, and ^ and $ at its ends or at those of its "
                f"outermost choices alone, got {json.dumps(pattern)[:100]}"
            )
    return "|".join(made)


def between_slashes(expression: str) -> str:
    """An expression of Lark, on one line."""
    line = expression.replace("\n", "\\n").replace("\r", "\\r")
    return "/" + re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", line) + "/"


def _alternatives(pattern: str) -> list[list[str]]:
    """What stands between the bars outside of all brackets."""
    made: list[list[str]] = [[]]
    depth = 0
    for step in _steps(pattern):
        depth += (step == "(") - (step == ")")
        if step == "|" and not depth:
            made.append([])
        else:
            made[-1].append(step)
    return made


def _steps(pattern: str) -> Iterator[str]:
    """Characters, what follows a backslash with it, and classes as one."""
    position = 0
    while position < len(pattern):
        end = _end_of_class(pattern, position) if pattern[position] == "[" else position + 1
        end += pattern[position] == "\\"
        step = pattern[position:end]
        yield re.sub(r"\\.", lambda match: _ASCII.get(match[0], match[0]), step)
        position = end


def _end_of_class(pattern: str, start: int) -> int:
    """Where a class ends, with those in it; a bracket right after its begin is a character."""
    position, depth = start, 0
    while position < len(pattern):
        if pattern[position] == "\\":
            position += 1
        elif pattern[position] == "[":
            depth += 1
            position += pattern[position + 1 : position + 2] == "^"
            position += pattern[position + 1 : position + 2] == "]"
        elif pattern[position] == "]":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return position
