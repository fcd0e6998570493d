"""JSON schemas as clients write them, checked and brought to one form, which grammars are made of.

Every keyword is held, says nothing of a value, or is refused by name and place. What llguidance
ignores, rounds or finds out too late is seen here: keywords of old drafts, formats, numbers that
64-bit floats do not hold, and references that lead nowhere or for ever in a circle.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from dsv4_jax import checks
from dsv4_jax.schemas.combine import (
    MAX_DEPTH,
    Schema,
    are_apart,
    depth_of,
    merge_objects,
    properties_named,
    types_of,
    without_endless,
)
from dsv4_jax.schemas.keywords import REFUSED, SAYS_NOTHING, TYPES, WAYS_OUT
from dsv4_jax.schemas.text_formats import FORMATS
from dsv4_jax.schemas.time_limit import check_time
from dsv4_jax.schemas.values import (
    MAX_DIGITS,
    MAX_EXACT,
    SchemaError,
    check_multiple,
    check_text,
    check_value,
    expression,
    is_rounded,
    keep_out_whole_bounds,
    refuse,
)

__all__ = ["HELD", "MAX_SCHEMA_CHARS", "Schema", "SchemaError", "read_schema"]

MAX_SCHEMA_CHARS = 2**16
"""The longest schema, or schemas of all tools."""


_MAX_COUNT = 2**20
"""Of least lengths: no answer is longer."""

_NO_LIMIT = 2**31
"""Of greatest lengths, which then say nothing."""


def read_schema(
    schema: Any,
    *,
    is_strict: bool = False,
    of_tool: bool = False,
    left_out: list[str] | None = None,
) -> Schema:
    """Checks a schema.

    Args:
      schema: parsed JSON.
      is_strict: objects that do not say which properties they have have those that they list or
        require, all of them and no other.
      of_tool: its properties are values by themselves; else it is one itself. An `enum` of such a
        value may hold any numbers, since those that llguidance rounds can be written without it.
      left_out: keywords that cannot be held are left out, and their places are added here; None
        refuses them. The schema allows more then, and nothing less.

    Raises:
      SchemaError: it is no schema, or says what cannot be held, or nothing fulfils it.
      TooLongError: it took longer than `reading_within` lets it.
    """
    if depth_of(schema) > MAX_DEPTH:
        raise SchemaError(f"a schema must be nested at most {MAX_DEPTH} deep")
    reader = _Reader(schema, is_strict, of_tool, left_out)
    root, shared = without_endless(*reader.read_all())
    if root is False:
        raise SchemaError("nothing fulfils the schema")
    return Schema(root, shared)


class _Reader:
    """Reads one schema, and what it refers to."""

    def __init__(
        self, schema: Any, is_strict: bool, of_tool: bool, left_out: list[str] | None
    ) -> None:
        self._schema = schema
        self._is_strict = is_strict
        self._of_tool = of_tool
        self._left_out = left_out
        self._names: dict[str, str] = {}
        self._unread: list[str] = []
        self._choices: list[tuple[dict[str, Any], str]] = []

    def read_all(self) -> tuple[Any, dict[str, Any]]:
        """The schema, and what is referred to by name."""
        root = self._read(self._schema, "#")
        shared = {}
        while self._unread:
            pointer = self._unread.pop()
            shared[self._names[pointer]] = self._read(self._find(pointer), pointer)
        for made, pointer in self._choices:
            options = made.pop("oneOf")
            with self._leaving_out(pointer):
                if not are_apart(options, shared):
                    rule = "must be of schemas that no value can be two of, as their types or a "
                    refuse(pointer, rule + "required property with a const show; or use anyOf")
            _also(made, {"anyOf": options})
        return root, shared

    def _read(self, schema: Any, pointer: str, *, closes: bool = True) -> Any:
        """A schema in its one form; False for one that nothing fulfils."""
        check_time()
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, dict):
            refuse(pointer, f"must be a schema, got {checks.shown(schema)}")
        if "allOf" in schema:
            whole = merge_objects(schema, self._find_any)
            if whole is not None:
                return self._read(whole, pointer, closes=closes)
        made: dict[str, Any] = {}
        for name in sorted(schema, key=_LAST.__eq__):
            where = _inside(pointer, name)
            with self._leaving_out(where):
                self._read_keyword(made, schema, name, where)
        for name, other in _ADDS_TO.items():
            if name in schema and name not in made:
                made.pop(other, None)
        if closes and self._is_strict and "properties" in schema:
            self._close(made)
        with self._leaving_out(f"{pointer}/minProperties"):
            self._count_properties(made, pointer)
        with self._leaving_out(pointer):
            keep_out_whole_bounds(made, pointer)
        return made

    @contextlib.contextmanager
    def _leaving_out(self, where: str) -> Iterator[None]:
        """Of a schema of which nothing is promised, what is refused at a place is left out."""
        try:
            yield
        except SchemaError:
            if self._left_out is None:
                raise
            self._left_out.append(where)

    def _read_keyword(
        self, made: dict[str, Any], schema: dict[str, Any], name: str, where: str
    ) -> None:
        if name in _READ:
            _READ[name](self, made, schema, where)
        elif name in ("$id", "id"):
            if where.count("/") > 1:
                refuse(where, "must be left out; all references are to places of one schema")
        elif name in REFUSED:
            if schema[name] is not False or name not in ("uniqueItems", "nullable"):
                refuse(where, WAYS_OUT.get(name, "cannot be held; leave it out"))
        elif name not in SAYS_NOTHING and not name.startswith("x-"):
            refuse(where, "is no keyword of JSON schemas that is known here; leave it out")

    def _close(self, made: dict[str, Any]) -> None:
        """What an object of a strict schema does not say itself."""
        parts = made["properties"]
        for name in made.setdefault("required", list(parts)):
            parts.setdefault(name, {})
        made.setdefault("additionalProperties", False)

    def _count_properties(self, made: dict[str, Any], pointer: str) -> None:
        """Nothing keeps a name that is not listed from coming twice, and counting twice."""
        least, required = made.pop("minProperties", 0), set(made.get("required", ()))
        if least <= len(required):
            return
        if least > len(required) + 1 or set(made.get("properties", ())) - required:
            refuse(f"{pointer}/minProperties", "cannot be held; list what is required")
        made["minProperties"] = least

    def _types(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        value = schema["type"]
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(one in TYPES for one in names):
            refuse(where, f"must be one of {', '.join(TYPES)}, or a list of them")
        made["type"] = value

    def _values(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        """`enum` and `const`, as `enum`."""
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list):
            refuse(where, "must be a list")
        if {"enum", "const"} <= set(schema):
            values = [one for one in values if json.dumps(one) == json.dumps(schema["const"])]
        above = where.rpartition("/")[0]
        is_value = above.startswith("#/properties/") and above.count("/") == 2
        plain = not set(schema) - SAYS_NOTHING - {"enum", "const", "type"}
        whole = plain and (is_value if self._of_tool else above == "#")
        for one in values:
            if not (whole and is_rounded(one)):
                check_value(one, where)
        made["enum"] = values

    def _count(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        name = where.rpartition("/")[2]
        value = schema[name]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_least = name.startswith("min")
        if type(value) is not int or value < 0 or (is_least and value > _MAX_COUNT):
            limit = f"from 0 to {_MAX_COUNT}" if is_least else "from 0 on"
            refuse(where, f"must be a whole number {limit}, got {checks.shown(value)}")
        if is_least or value < _NO_LIMIT:
            _also(made, {name: value})

    def _bound(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        name = where.rpartition("/")[2]
        value = schema[name]
        if isinstance(value, bool) and name[9:].lower() in schema:
            return  # of draft 4, read with the bound that it is about
        if type(value) not in (int, float) or not -MAX_EXACT <= value <= MAX_EXACT:
            refuse(where, f"must be a number from -2^53 to 2^53, got {checks.shown(value)}")
        if is_rounded(value):
            refuse(where, f"must have at most {MAX_DIGITS} digits, got {value!r}")
        if name == "multipleOf":
            check_multiple(value, where)
        exclusive = f"exclusive{name.capitalize()}"
        made[exclusive if schema.get(exclusive) is True else name] = value

    def _pattern(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        _also(made, {"pattern": expression(schema["pattern"], where)})

    def _format(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        name = schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            refuse(where, f"must be left out or one of {', '.join(FORMATS)}, got "
                           f"{checks.shown(name)}")  # fmt: skip
        for part in FORMATS[name]:
            _also(made, part)

    def _map(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        name = where.rpartition("/")[2]
        if not isinstance(schema[name], dict):
            refuse(where, "must be an object")
        parts = {key: self._read(one, _inside(where, key)) for key, one in schema[name].items()}
        for key in parts:
            if name == "patternProperties":
                expression(key, where)
            else:
                check_text(key, where)
        made[name] = parts

    def _property_names(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        """`propertyNames`, as the properties that there may be."""
        given = schema[_LAST]
        for _ in range(MAX_DEPTH):
            if isinstance(given, dict) and set(given) - SAYS_NOTHING == {"$ref"}:
                given = self._find_any(given["$ref"])
        names = self._read(given, where)
        if names is not False and not set(names) - {"type"} and "string" in types_of(names):
            return
        rest = schema.get("additionalProperties", True)
        value = self._read(rest, f"{where.rpartition('/')[0]}/additionalProperties")
        listed = None if names is False else properties_named(names, value)
        if listed is None or {"properties", "patternProperties"} & set(schema):
            refuse(where, "cannot be held but for an enum, a pattern or lengths alone, in objects "
                          "of which nothing else is listed")  # fmt: skip
        if "patternProperties" in listed and "required" in schema:
            refuse(where, "cannot be held beside required; list what is required")
        made |= listed

    def _list(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        name = where.rpartition("/")[2]
        parts = schema[name]
        if not isinstance(parts, list) or not parts:
            refuse(where, "must be a list of one schema at least")
        closes = name != "allOf"
        read = [self._read(one, f"{where}/{i}", closes=closes) for i, one in enumerate(parts)]
        made[name] = [*made.get(name, []), *read]
        if name == "oneOf":
            self._choices.append((made, where))
        if name == "allOf" and self._is_strict and any(map(_is_open, read)):
            refuse(where, "must be of objects with type, properties and required alone where a "
                           "schema is strict; write the object that they are together")  # fmt: skip

    def _items(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        """`items`, and its older spelling with `additionalItems`."""
        value = schema["items"]
        if isinstance(value, list):
            made["prefixItems"] = [self._read(one, f"{where}/{i}") for i, one in enumerate(value)]
            if "additionalItems" in schema:
                rest = f"{where.rpartition('/')[0]}/additionalItems"
                made["items"] = self._read(schema["additionalItems"], rest)
        else:
            made["items"] = self._read(value, where)

    def _inner(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        name = where.rpartition("/")[2]
        made[name] = self._read(schema[name], where)

    def _required(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        names = schema["required"]
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            refuse(where, "must be a list of names")
        for name in names:
            check_text(name, where)
        made["required"] = list(dict.fromkeys(names))

    def _reference(self, made: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            refuse(where, f'must be "#" or begin with "#/", got {checks.shown(pointer)}; '
                           "references are to places of the schema itself")  # fmt: skip
        if pointer not in self._names:
            self._find(pointer)
            self._names[pointer] = str(len(self._names))
            self._unread.append(pointer)
        made["$ref"] = f"#/$defs/{self._names[pointer]}"

    def _find_any(self, pointer: Any) -> Any:
        """A place that may not be one; None then."""
        return self._find(pointer) if isinstance(pointer, str) and pointer.startswith("#") else None

    def _find(self, pointer: str) -> Any:
        """What a reference is to."""
        value = self._schema
        for step in urllib.parse.unquote(pointer[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                refuse(pointer, "is referred to and is not there")
        return value


def _nothing(*_: Any) -> None:
    """For what is read together with another keyword."""


_LAST = "propertyNames"
"""It is read after the other keywords of an object, and takes the place of some."""

_ADDS_TO = {
    "properties": "additionalProperties",
    "patternProperties": "additionalProperties",
    "prefixItems": "items",
}
"""Where the one is left out, the other would be about what the one allows."""

type _Rule = Callable[[_Reader, dict[str, Any], dict[str, Any], str], None]
_READ: dict[str, _Rule] = {
    "type": _Reader._types,
    "enum": _Reader._values,
    "const": _Reader._values,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _Reader._count),
    **dict.fromkeys(("minProperties", "maxProperties"), _Reader._count),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _Reader._bound),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _Reader._bound),
    "pattern": _Reader._pattern,
    "format": _Reader._format,
    "properties": _Reader._map,
    "patternProperties": _Reader._map,
    "propertyNames": _Reader._property_names,
    "required": _Reader._required,
    "additionalProperties": _Reader._inner,
    "items": _Reader._items,
    "prefixItems": _Reader._list,
    "additionalItems": _nothing,
    "anyOf": _Reader._list,
    "oneOf": _Reader._list,
    "allOf": _Reader._list,
    "$ref": _Reader._reference,
}
HELD = frozenset(_READ)
"""Keywords that are held, or refused for a value that cannot be."""


def _is_open(part: Any) -> bool:
    """A part of `allOf` may be of objects that a strict schema closes only together."""
    return bool(part) and not {"properties", "$ref", "anyOf", "oneOf"}.isdisjoint(part)


def _inside(pointer: str, name: str) -> str:
    """A step on, in a JSON pointer."""
    return f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"


def _also(made: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds keywords to a schema; beside those that it has already, where it has one of them."""
    if set(made) & set(part):
        made["allOf"] = [*made.get("allOf", []), part]
    else:
        made |= part
