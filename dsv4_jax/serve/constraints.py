"""Constraints: what a request says of its answer's form, as a grammar of the engine.

An answer is its reasoning up to `</think>`, where it thinks, then text or JSON, then calls
as `tool_calls` has them. The mark that begins the tags of calls is a token that no text stands
for, so that neither reasoning nor a value holds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.read_schema import Schema, SchemaError, read_schema
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.forms.grammar_lines import Lines
from dsv4_jax.serve.forms.tags import V4_TAGS, Tags
from dsv4_jax.serve.forms.tool_calls import call_of
from dsv4_jax.serving.requests.grammars import MARK
from dsv4_jax.step.grammar import MAX_CHARS, Grammar

_REASONING = "</think>"
_ANY_TEXT = "/(?s:.*)/"
_HEAD_CHARS = 180
"""That a grammar has for each tool beside its name and parameters, and for the rest of it."""


class Wanted(NamedTuple):
    """What a request says of its answer's form.

    Attributes:
      thinks: the answer begins with reasoning.
      schema: of an answer that is JSON; None is text.
      is_advisory: nothing is promised of the schema, and what cannot be held of it is left out.
      is_strict: objects of the schema that do not say which properties they have have those that
        they list, all of them and no other; so it is with a tool that says `strict`.
      tools: what may be called, as functions of chat completions.
      must_call: it calls one at least.
      calls_once: it calls one at most.
      is_open: the prompt has opened the block of calls.
      field: of the request, that asks for this; for errors.
    """

    thinks: bool
    schema: Any = None
    is_advisory: bool = False
    is_strict: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    calls_once: bool = False
    is_open: bool = False
    field: str = ""

    @property
    def is_free(self) -> bool:
        """Anything goes: tools without a promise of their arguments are the model's own affair."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        asks = strict or self.must_call or bool(self.tools and self.calls_once)
        return self.schema is None and not asks


def grammar_of(
    wanted: Wanted,
    token_ids: Mapping[str, int],
    left_out: list[str] | None = None,
    tags: Tags = V4_TAGS,
) -> Grammar | None:
    """The grammar of an answer; None if anything goes.

    Args:
      wanted: what is asked for.
      token_ids: the ids of a tokenizer's added tokens.
      left_out: is added the places of what an advisory schema says and the grammar does not.
      tags: of calls, as the model names them.

    Raises:
      ApiError: a schema cannot be held, or is too long or too deep, or the tokenizer lacks a token.
    """
    if wanted.is_free:
        return None
    names = [tool["function"]["name"] for tool in wanted.tools]
    heads = sum(len(json.dumps(name)) + _HEAD_CHARS for name in names)
    lines = Lines(token_ids, num_reserved=heads + _HEAD_CHARS, tags=tags)
    if wanted.schema is None:
        answer = _calls(wanted, lines)
    else:
        answer = _json(wanted, lines, [] if left_out is None else left_out)
    lead = f"{_ANY_TEXT} {lines.token(_REASONING)} " if wanted.thinks else ""
    text = "\n".join([f"start: {lead}answer", f"answer: {answer}", *lines.rules])
    if len(text) > MAX_CHARS:
        raise ApiError(400, "tools must be fewer, or have shorter names", param="tools")
    return Grammar("lark", text)


def _json(wanted: Wanted, lines: Lines, left_out: list[str]) -> str:
    """An answer that is JSON: of a schema, or of as much of an advisory one as can be held."""
    places: list[str] | None = [] if wanted.is_advisory else None
    try:
        schema = read_schema(wanted.schema, is_strict=wanted.is_strict, left_out=places)
        lines.count(schema)
    except SchemaError as error:
        raise ApiError(400, f"{wanted.field}: {error}", param=wanted.field) from None
    if places is not None and not _is_read(schema):
        places = ["#"]
        schema = Schema({name: one for name, one in schema.root.items() if name == "type"}, {})
    left_out += places or []
    return json_value(schema)


def _is_read(schema: Schema) -> bool:
    """Llguidance reads a schema, if only to find that nothing fulfils it."""
    from llguidance import LLMatcher

    told = LLMatcher.validate_grammar(f"start: {json_value(schema)}")
    return not told or "Unsatisfiable" in told


def _calls(wanted: Wanted, lines: Lines) -> str:
    """An answer that may or must call tools."""
    mark, calls = lines.token(MARK), []
    numbered = list(enumerate(wanted.tools))
    # What there is room for is first of all for those of which something is promised.
    for number, tool in sorted(numbered, key=lambda one: not one[1]["function"].get("strict")):
        try:
            calls.append(lines.rule("tool", call_of(tool, lines)))
        except SchemaError as error:
            name = tool["function"]["name"]
            raise ApiError(
                400, f"tools[{number}], {name}, which is strict: {error}", param="tools"
            ) from None
    times = "" if wanted.calls_once else "+"
    inner = f'({" | ".join(calls)}){times} "</" {mark} "{lines.tags.block}>"'
    if wanted.is_open:
        return inner
    block = lines.rule("calls", f'{mark} "{lines.tags.block}>\\n" {inner}')
    if wanted.must_call:
        return f"/\\n{{0,2}}</ {block}"
    return f"{_ANY_TEXT} | /(?s:.*)</ {block}"
