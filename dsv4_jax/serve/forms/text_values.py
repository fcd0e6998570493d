"""Texts that a call holds as they are, not as JSON, and which of a schema's values are texts."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dsv4_jax.schemas.combine import types_of
from dsv4_jax.schemas.read_schema import Schema, SchemaError
from dsv4_jax.schemas.time_limit import check_time
from dsv4_jax.serve.forms.text_patterns import between_slashes, found_in

NO_TEXT = ("null", "boolean", "number", "array", "object")

_MAX_CHOICES = 64
_MAX_VISITS = 10_000
"""Schemas that are looked at for one value; references to references could be endlessly many."""


class Text(NamedTuple):
    """What a text has to be; all of it holds.

    Attributes:
      values: the texts that it is one of; None is any.
      patterns: regular expressions that are found in it.
      least: characters, at least.
      most: characters, at most; None is no limit.
    """

    values: tuple[str, ...] | None = None
    patterns: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None

    def and_(self, other: Text) -> Text:
        """What is both."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            both = set(other.values)
            values = tuple(one for one in self.values if one in both)
        limits = [one for one in (self.most, other.most) if one is not None]
        return Text(
            values,
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            max(self.least, other.least),
            min(limits, default=None),
        )

    def left(self) -> Text | None:
        """It with the values alone that fit; None if no text does."""
        if self.most is not None and self.least > self.most:
            return None
        if self.values is None:
            return self if not self.patterns or _is_met(self.as_schema()) else None
        values = [
            one
            for one in self.values
            if self.least <= len(one) and (self.most is None or len(one) <= self.most)
        ]
        if self.patterns:
            values = [one for one in values if _is_met({**self.as_schema(), "enum": [one]})]
        return Text(tuple(values)) if values else None

    def as_schema(self) -> dict[str, Any]:
        """It as a schema of JSON, without its values."""
        limits = {"minLength": self.least} | ({} if self.most is None else {"maxLength": self.most})
        return {"type": "string", **limits, "allOf": [{"pattern": one} for one in self.patterns]}


def texts_of(part: Any, schema: Schema) -> list[Text]:
    """The texts that fulfil a part of a schema: those of any of what is listed.

    Raises:
      SchemaError: there are too many choices.
    """
    found = [text.left() for text in _texts(part, schema, (), itertools.count())]
    return [text for text in dict.fromkeys(found) if text is not None]


def other_values(part: Any, schema: Schema, pointer: str) -> dict[str, Any] | None:
    """A part of a schema without its texts; None if texts alone fulfil it.

    Raises:
      SchemaError: llguidance cannot hold it; the place is the part's.
    """
    found = _others(part, schema, ())
    told = "Unsatisfiable" if found is None else _problem(schema.part(found))
    if told and "Unsatisfiable" not in told:
        raise SchemaError(f"{pointer} cannot be held: {told.partition(chr(10))[0]}")
    return None if told else found


def _others(part: Any, schema: Schema, seen: tuple[str, ...]) -> dict[str, Any] | None:
    if part is False or types_of(part) == {"string"}:
        return None
    if not texts_of(part, schema):
        return part
    if set(part) == {"anyOf"}:
        parts = [_others(one, schema, seen) for one in part["anyOf"]]
        parts = [one for one in parts if one is not None]
        return {"anyOf": parts} if parts else None
    if set(part) == {"$ref"}:
        name = part["$ref"].rpartition("/")[2]
        return None if name in seen else _others(schema.shared[name], schema, (*seen, name))
    if "enum" in part and not set(part) - {"enum", "type"}:
        values = [one for one in part["enum"] if not isinstance(one, str)]
        return {**part, "enum": values} if values else None
    return {"allOf": [part, {"type": list(NO_TEXT)}]}


def _texts(part: Any, schema: Schema, seen: tuple[str, ...], visits: Iterator[int]) -> list[Text]:
    check_time()
    if next(visits) > _MAX_VISITS:
        raise SchemaError("a value must have fewer choices")
    if part is False or "string" not in types_of(part):
        return []
    own = Text(
        tuple(one for one in part["enum"] if isinstance(one, str)) if "enum" in part else None,
        (part["pattern"],) if "pattern" in part else (),
        part.get("minLength", 0),
        part.get("maxLength"),
    )
    together = [[own]]
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        if name in seen:
            return []  # a circle adds nothing
        together.append(_texts(schema.shared[name], schema, (*seen, name), visits))
    if "anyOf" in part:
        choices = [text for one in part["anyOf"] for text in _texts(one, schema, seen, visits)]
        together.append(_in_one_list(choices))
    together += [_texts(one, schema, seen, visits) for one in part.get("allOf", ())]
    return list(_all_of(together))


def _in_one_list(texts: list[Text]) -> list[Text]:
    """The same, all that list values as one."""
    lists = [text for one in texts if one.values is not None and (text := one.left())]
    values = tuple(dict.fromkeys(value for one in lists for value in one.values or ()))
    return [*([Text(values)] if values else []), *(one for one in texts if one.values is None)]


def _all_of(together: Sequence[list[Text]]) -> Iterator[Text]:
    count = 1
    for texts in together:
        count *= len(texts)
    if count > _MAX_CHOICES:
        raise SchemaError(f"a text must have at most {_MAX_CHOICES} choices, got {count}")
    for chosen in itertools.product(*together):
        check_time()
        made = Text()
        for one in chosen:
            made = made.and_(one)
        yield made


def _is_met(schema: Mapping[str, Any]) -> bool:
    """Something fulfils a schema, as far as llguidance sees when it reads it."""
    return "Unsatisfiable" not in _problem(schema)


def _problem(schema: Mapping[str, Any]) -> str:
    """What llguidance says of a schema; "" if it holds it."""
    check_time()
    return _told(json.dumps(schema))


@functools.lru_cache(1024)
def _told(schema_json: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema_json))


def ends_of(text: Text, pointer: str) -> str:
    """A text and the `</` after it, as an expression for a terminal of Lark.

    Raises:
      SchemaError: a pattern cannot be held here; the place is the schema's.
    """
    if text.values is not None:
        return " | ".join(json.dumps(f"{one}</") for one in text.values)
    parts = [found_in(one, pointer) for one in text.patterns]
    if text.least or text.most is not None:
        parts.append(f"(?s:.{{{text.least},{'' if text.most is None else text.most}}})")
    if not parts:
        return "/(?s:.*)<\\//"
    return f'({" & ".join(between_slashes(one) for one in parts)}) "</"'
