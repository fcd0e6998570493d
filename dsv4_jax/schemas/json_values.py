"""JSON values in a grammar of Lark: what llguidance writes for a schema, and how it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsv4_jax.schemas.combine import types_of
from dsv4_jax.schemas.read_schema import Schema
from dsv4_jax.schemas.values import is_rounded

JSON_SPACE = "( |\\n {0,40})?"
"""Between the parts of JSON; a model that may write any white space can go on with it for ever."""

_OPTIONS = {
    "whitespace_pattern": JSON_SPACE,
    # Without \u: spelled by its code, a listed name would pass for one that is not listed.
    "json_allowed_escapes": 'nrbtf\\"',
}


def json_value(schema: Schema, part: Mapping[str, Any] | None = None) -> str:
    """A value of a schema, as an expression of Lark.

    Args:
      schema: what the part refers into.
      part: of the schema; None is all of it.
    """
    part = schema.root if part is None else part
    values = part.get("enum", ())
    literals = [json.dumps(str(one)) for one in values if is_rounded(one)]
    if literals and "number" in types_of(part):
        others = [one for one in values if not is_rounded(one) and _is_of(one, part)]
        if others:
            literals.append(_asked({**part, "enum": others}))
        return f"({' | '.join(literals)})"
    return _asked(schema.part(part))


def _is_of(value: Any, part: Mapping[str, Any]) -> bool:
    """A value is of the types that a schema names."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        kinds = {bool: "boolean", str: "string", list: "array", dict: "object"}
        return kinds.get(type(value), "null") in types_of(part)
    whole = isinstance(value, int) or value.is_integer()
    return "number" in types_of(part) and (whole or part.get("type") != "integer")


def _asked(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _OPTIONS})
