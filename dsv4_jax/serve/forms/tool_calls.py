"""Calls of tools, as rules of Lark.

A block of calls is

    <DSML tool_calls>
    <DSML invoke name="weather">
    <DSML parameter name="city" string="true">Paris</DSML parameter>
    <DSML parameter name="days" string="false">3</DSML parameter>
    </DSML invoke>
    </DSML tool_calls>

where `DSML` stands for the token of that name, and the tags are named as V4 names them (`tags.py`).
Values of text are written as they are, others as JSON. Names are written as they are too, and read
as far as the next space or quote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dsv4_jax.schemas.combine import types_of
from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.read_schema import Schema, SchemaError, read_schema
from dsv4_jax.serve.forms.grammar_lines import Lines
from dsv4_jax.serve.forms.text_values import ends_of, other_values, texts_of
from dsv4_jax.serving.requests.grammars import MARK

_MAX_OBJECTS = 32
_BODY = {"type", "properties", "required", "additionalProperties"}
_WRITTEN = re.compile(r"[^\x00-\x20\"\\\x7f]*")
"""Names that are the same when they were written in a call and read from it."""


def call_of(tool: Mapping[str, Any], lines: Lines) -> str:
    """One call of a tool, its parameters in the order of its schema.

    Where a tool is not strict, what cannot be held of its schema is left out, and its parameters
    are free if that is the whole.

    Raises:
      SchemaError: the tool is strict, and its schema cannot be held.
    """
    function, mark = tool["function"], lines.token(MARK)
    schema = function.get("parameters") or {"type": "object"}
    is_strict = bool(function.get("strict"))
    try:
        with lines.undone_if_refused():
            left_out = None if is_strict else []
            read = read_schema(schema, is_strict=is_strict, of_tool=True, left_out=left_out)
            lines.count(read)
            bodies = _bodies(read, is_strict, lines)
            lines.check_room(bodies)
    except SchemaError:
        if is_strict:
            raise
        bodies = [f"{_further({}, [], Schema({}, {}), lines)}*"]  # any names and values
    call = lines.tags.call
    begin = _quoted(f'{call} name="{function["name"]}">\n')
    return f'"<" {mark} {begin} ({" | ".join(bodies)}) "</" {mark} "{call}>\\n"'


def _bodies(schema: Schema, is_strict: bool, lines: Lines) -> list[str]:
    """The parameters of each of the objects that a schema may be of."""
    found, unread, num_read = [], [schema.root], 0
    while unread:
        part, num_read = unread.pop(0), num_read + 1
        if num_read > _MAX_OBJECTS:
            raise SchemaError(f"all arguments together must be of at most {_MAX_OBJECTS} choices")
        if part is False or "object" not in types_of(part):
            continue
        others = set(part) - {"type"}
        if others == {"$ref"}:
            unread.append(schema.shared[part["$ref"].rpartition("/")[2]])
        elif others == {"anyOf"}:
            unread += part["anyOf"]
        elif others - _BODY:
            keyword = min(others - _BODY)
            raise SchemaError(f"#/{keyword} cannot be held of all arguments together; leave it out")
        else:
            found.append(_body(part, schema, is_strict, lines))
    if not found:
        raise SchemaError("nothing fulfils the schema")
    return found


def _body(part: dict[str, Any], schema: Schema, is_strict: bool, lines: Lines) -> str:
    listed, rest = dict(part.get("properties", {})), part.get("additionalProperties")
    required = part.get("required", [])
    for name in required:
        listed.setdefault(name, {} if rest is None else rest)
    wanted = []
    for name, one in listed.items():
        choices = _value(one, schema, f"#/properties/{name}", lines)
        if not choices:
            if name in required:
                raise SchemaError(f"#/properties/{name} is required, and nothing fulfils it")
            continue
        if not _WRITTEN.fullmatch(name):
            raise SchemaError(
                f"#/properties/{name[:64]} must have a name without spaces, quotes and "
                "backslashes, which calls write as they are"
            )
        head = _quoted(f'{lines.tags.parameter} name="{name}" string=')
        written = _parameter(head, choices, lines)
        wanted.append(written if name in required else f"({written})?")
    if rest is None:
        rest = False if listed or (is_strict and "properties" in part) else {}
    if rest is not False:
        wanted.append(f"{_further(rest, list(listed), schema, lines)}*")
    return " ".join(wanted) or '""'


def _further(rest: Any, listed: list[str], schema: Schema, lines: Lines) -> str:
    """A parameter that is not listed."""
    choices = _value(rest, schema, "#/additionalProperties", lines)
    if not choices:
        raise SchemaError("#/additionalProperties must be false, since nothing fulfils it")
    others = f" & ~({' | '.join(map(_quoted, listed))})" if listed else ""
    name = lines.terminal(f'/[^\\x00-\\x20"\\\\<>\\x7f]{{1,64}}/{others}')
    head = f'"{lines.tags.parameter} name=\\"" {name} "\\" string="'
    return lines.rule("further", _parameter(head, choices, lines))


def _parameter(head: str, choices: list[str], lines: Lines) -> str:
    mark = lines.token(MARK)
    end = f'"{lines.tags.parameter}>\\n"'
    value = lines.rule("value", f"({' | '.join(choices)}) {mark} {end}")
    return f'"<" {mark} {head} {value}'


def _value(part: Any, schema: Schema, pointer: str, lines: Lines) -> list[str]:
    """How a value may be written, from its mark of text to the begin of the tag after it."""
    choices = []
    for text in texts_of(part, schema):
        choices.append(f'"\\"true\\">" {lines.terminal(ends_of(text, pointer))}')
    others = other_values(part, schema, pointer)
    if others is not None:
        choices.append(f'"\\"false\\">" {json_value(schema, others)} "</"')
    return choices


def _quoted(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text)
