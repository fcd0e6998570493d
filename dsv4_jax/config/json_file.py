"""JSON files that come from outside: of limited size and depth, UTF-8, no name twice."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np

from dsv4_jax.lines import without_mark
from dsv4_jax.regular_files import read_regular, show_path

MAX_JSON_BYTES = 100_000_000
"""As safetensors allows for a header; an index of 200,000 tensors takes a fifth of it."""

MAX_DEPTH = 64
"""Of arrays and objects in each other. `json` itself and `repr` recurse, and Python ends that."""

_STRING = re.compile(r'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_STRING_OR_BRACKET = re.compile(rf"{_STRING.pattern}|[\[\]{{}}]", re.DOTALL)


def read_json_object(file: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads a file that holds one JSON object, perhaps after a byte order mark.

    Raises:
      ValueError: it is no regular file, larger than `max_bytes`, no UTF-8, no JSON, nested deeper
        than `MAX_DEPTH`, no object, or an object in it has a name twice. The message begins with
        the file.
      OSError: it cannot be read.
    """
    return parse_json_object(without_mark(read_regular(file, max_bytes)), show_path(file))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parses the bytes of one JSON object; `where` begins the messages of errors.

    Raises:
      ValueError: as for `read_json_object`.
    """
    try:
        text = data.decode("utf-8")
        check_depth(text)
        parsed = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:  # json's and the codec's own errors are of this type
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{where} must hold a JSON object, got {type(parsed).__name__}")
    return parsed


def check_depth(text: str) -> None:
    """Raises ValueError if brackets outside of strings are nested deeper than `MAX_DEPTH`."""
    marks = np.frombuffer(_STRING.sub("", text).encode("ascii", "replace"), np.uint8)
    steps = np.zeros(len(marks), np.int8)
    steps[(marks == ord("[")) | (marks == ord("{"))] = 1
    steps[(marks == ord("]")) | (marks == ord("}"))] = -1
    if np.cumsum(steps, dtype=np.int32).max(initial=0) <= MAX_DEPTH:
        return
    depth = 0  # once more by steps of Python, to say where
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found[0][0]
        depth += (mark in "[{") - (mark in "]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}, at character {found.start()}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {twice!r} is there twice in one object")
    return found
