"""Constraints: what a request says of its answer's form, as a grammar of the engine.

An answer of V4 is its reasoning up to `</think>`, where it thinks, then text or JSON, then calls:

    <DSML tool_calls>
    <DSML invoke name="weather">
    <DSML parameter name="city" string="true">Paris</DSML parameter>
    <DSML parameter name="days" string="false">3</DSML parameter>
    </DSML invoke>
    </DSML tool_calls>

where `DSML` stands for the token of that name. Values of text are written as they are, others as
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serving.grammars import JSON_SPACE
from dsv4_jax.step.grammar import Grammar

MAX_SCHEMA_CHARS = 2**16
"""The longest schema, or schemas of all tools."""

_MAX_DEPTH = 64
_REASONING = "</think>"
_MARK = "\uff5cDSML\uff5c"
_ANY_TEXT = "/(?s:.*)/"


class Wanted(NamedTuple):
    """What a request says of its answer's form.

    Attributes:
      thinks: the answer begins with reasoning.
      schema: of an answer that is JSON; None is text.
      is_strict: objects of the schema that do not say which properties they have have those that
        they list, all of them and no other; so it is with a tool that says `strict`.
      tools: what may be called, as functions of chat completions.
      must_call: it calls one at least.
      calls_once: it calls one at most.
    """

    thinks: bool
    schema: Any = None
    is_strict: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    calls_once: bool = False

    @property
    def is_free(self) -> bool:
        """Anything goes: tools without a promise of their arguments are the model's own affair."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        asks = strict or self.must_call or bool(self.tools and self.calls_once)
        return self.schema is None and not asks


def grammar_of(wanted: Wanted, token_ids: Mapping[str, int]) -> Grammar | None:
    """The grammar of an answer; None if anything goes.

    Args:
      wanted: what is asked for.
      token_ids: the ids of a tokenizer's added tokens.

    Raises:
      ApiError: a schema is too long or too deep, or the tokenizer lacks a token.
    """
    if wanted.is_free:
        return None
    lines = _Lines(token_ids)
    answer = (
        lines.json(wanted.schema, is_strict=wanted.is_strict)
        if wanted.schema is not None
        else _calls(wanted, lines)
    )
    lead = f"{_ANY_TEXT} {lines.token(_REASONING)} " if wanted.thinks else ""
    rules = [f"start: {lead}answer", f"answer: {answer}", *lines.rules]
    return Grammar("lark", "\n".join(rules))


def _calls(wanted: Wanted, lines: _Lines) -> str:
    """An answer that may or must call tools."""
    mark = lines.token(_MARK)
    names = [lines.rule(f"tool{n}", _call(one, lines)) for n, one in enumerate(wanted.tools)]
    times = "" if wanted.calls_once else "+"
    block = lines.rule(
        "calls", f'{mark} "tool_calls>\\n" ({" | ".join(names)}){times} "</" {mark} "tool_calls>"'
    )
    called = f"/(?s:.*)</ {block}"
    return f"/\\n{{0,2}}</ {block}" if wanted.must_call else f"{_ANY_TEXT} | {called}"


def _call(tool: Mapping[str, Any], lines: _Lines) -> str:
    """One call of a tool, its parameters in the order of its schema."""
    function, mark = tool["function"], lines.token(_MARK)
    schema = _need(function.get("parameters") or {"type": "object"}, dict, "parameters")
    lines.count(schema)
    if function.get("strict"):
        schema = _closed(schema)
    begin = f'"<" {mark} {_quoted(f"invoke name={_attribute(function['name'])}>")} "\\n"'
    end = f'"</" {mark} "invoke>\\n"'
    parts = schema.get("properties")
    closed = schema.get("additionalProperties") is False
    if not isinstance(parts, dict) or not (parts or closed) or set(schema) & _COMBINED:
        return f"{begin} {_any_parameter(lines)}* {end}"
    required = _need(schema.get("required", []), list, "required")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    wanted = []
    for name, part in parts.items():
        one = _parameter(name, part, shared, lines)
        wanted.append(one if name in required else f"({one})?")
    return " ".join([begin, *wanted, end])


_COMBINED = {"anyOf", "oneOf", "allOf", "$ref", "patternProperties"}
"""What says more of an object than its properties do."""


def _parameter(name: str, schema: Any, shared: Mapping[str, Any], lines: _Lines) -> str:
    mark = lines.token(_MARK)
    head = f'"<" {mark} {_quoted(f"parameter name={_attribute(name)} string=")}'
    tail = f'{mark} "parameter>\\n"'
    kinds = _kinds_of(schema, shared, set())
    texts = _need(schema.get("enum", []), list, "enum") if isinstance(schema, dict) else []
    if isinstance(schema, dict) and "const" in schema:
        texts = [schema["const"]]
    choices = []
    if texts:
        written = [_quoted(one + "</") for one in texts if isinstance(one, str)]
        if written:
            choices.append(f'"\\"true\\">" ({" | ".join(written)})')
        others = [one for one in texts if not isinstance(one, str)]
        if others:
            choices.append(f'"\\"false\\">" {lines.json({"enum": others})} "</"')
    else:
        if kinds is None or "string" in kinds:
            choices.append('"\\"true\\">" /(?s:.*)<\\//')
        if kinds != ["string"]:
            part = {**schema, **shared} if isinstance(schema, dict) else {}
            if kinds is not None and "type" in part:
                part["type"] = [one for one in kinds if one != "string"]
            choices.append(f'"\\"false\\">" {lines.json(part)} "</"')
    return f"{head} ({' | '.join(choices)}) {tail}"


def _kinds_of(schema: Any, shared: Mapping[str, Any], seen: set[str]) -> list[str] | None:
    """Types of a value, where a schema or those that it refers to name them all; else None."""
    if not isinstance(schema, dict):
        return None
    if "type" in schema:
        kind = schema["type"]
        return [kind] if isinstance(kind, str) else _need(kind, list, "type")
    if "anyOf" in schema:
        parts = [_kinds_of(one, shared, seen) for one in _need(schema["anyOf"], list, "anyOf")]
        return None if None in parts else [kind for part in parts for kind in part or ()]
    path = schema.get("$ref")
    if not isinstance(path, str):
        return None
    if path in seen:
        return []  # its types are known
    seen.add(path)
    folder, _, name = path.removeprefix("#/").partition("/")
    parts = shared.get(folder)
    return _kinds_of(parts.get(name), shared, seen) if isinstance(parts, dict) else None


def _closed(schema: Any) -> Any:
    """A schema whose objects have all the properties that they list, where they do not say."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _MAPS and isinstance(part, dict):
            closed[name] = {key: _closed(one) for key, one in part.items()}
        else:
            closed[name] = part if name in _VALUES else _closed(part)
    if isinstance(closed.get("properties"), dict):
        closed.setdefault("required", list(closed["properties"]))
        closed.setdefault("additionalProperties", False)
    return closed


_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_VALUES = {"enum", "const", "default", "examples", "required", "allOf"}
"""What holds values, or parts of one object that must not be closed one by one."""


def _need[T](value: Any, kind: type[T], name: str) -> T:
    """A part of a tool's schema that is of a type; else an `ApiError`."""
    if not isinstance(value, kind):
        raise ApiError(400, f"tools: {name} of a schema must be a JSON {_JSON_NAMES[kind]}")
    return value


_JSON_NAMES = {dict: "object", list: "array"}


def _any_parameter(lines: _Lines) -> str:
    """A parameter of any name and value."""
    mark = lines.token(_MARK)
    return lines.rule(
        "parameter",
        f'"<" {mark} /parameter name="[^"\\n<>]{{1,64}}" string="/ '
        f'("true\\">" /(?s:.*)<\\// | "false\\">" {lines.json({})} "</") {mark} "parameter>\\n"',
    )


class _Lines:
    """The rules of a grammar so far, and how long its schemas are together."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: dict[str, str] = {}
        self._num_chars = 0

    @property
    def rules(self) -> list[str]:
        return [f"{name}: {text}" for name, text in self._rules.items()]

    def rule(self, name: str, text: str) -> str:
        """Adds a rule; its name."""
        self._rules[name] = text
        return name

    def token(self, text: str) -> str:
        """A token by its id, which text cannot stand for."""
        if text not in self._token_ids:
            raise ApiError(400, f"answers have no form here: the tokenizer has no {text}")
        return f"<[{self._token_ids[text]}]>"

    def json(self, schema: Any, *, is_strict: bool = False) -> str:
        """A value of a schema."""
        self.count(schema)
        if is_strict:
            schema = _closed(schema)
        spaced = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
        return "%json " + json.dumps(schema | spaced if isinstance(schema, dict) else schema)

    def count(self, schema: Any) -> None:
        """Refuses a schema that is too much for a server."""
        if _depth_of(schema) > _MAX_DEPTH:
            raise ApiError(400, f"a schema must be nested at most {_MAX_DEPTH} deep")
        self._num_chars += len(json.dumps(schema))
        if self._num_chars > MAX_SCHEMA_CHARS:
            raise ApiError(400, f"schemas must have at most {MAX_SCHEMA_CHARS} characters together")


def _depth_of(value: Any) -> int:
    """How deep dicts and lists lie in each other; a recursion would end at Python's limit."""
    depth, layer = 0, [value]
    while layer and depth <= _MAX_DEPTH:
        inner: list[Any] = []
        for one in layer:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        depth, layer = depth + 1, inner
    return depth


def _attribute(text: str) -> str:
    """A name between the quotes of an attribute, as V4's prompts have it."""
    return f'"{text}"'


def _quoted(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text)
