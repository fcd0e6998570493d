"""What schemas are together: objects that are merged, choices that exclude each other, circles.

All but `depth_of` and `merge_objects` take schemas as `read_schema` makes them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dsv4_jax.schemas.keywords import SAYS_NOTHING
from dsv4_jax.schemas.time_limit import check_time

MAX_DEPTH = 64
_MAX_HOPS = 32
_MAX_CHOICES = 64
_ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
"""Keywords whose values are schemas by name, lists of schemas, and one schema."""


class Schema(NamedTuple):
    """A schema in one form: without annotations, `const`, `oneOf`, `format` and old spellings.

    Attributes:
      root: keywords by name.
      shared: what "#/$defs/NAME" refers to, by NAME.
    """

    root: dict[str, Any]
    shared: dict[str, Any]

    def part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """A part as a schema by itself, with all that it refers to."""
        check_time()
        needed: dict[str, Any] = {}
        unread: list[Any] = [part]
        while unread:
            for name in references_of(unread.pop()) - set(needed):
                needed[name] = self.shared[name]
                unread.append(self.shared[name])
        return {**part, "$defs": needed} if needed else dict(part)


def depth_of(value: Any) -> int:
    """How deep dicts and lists lie in each other; a recursion would end at Python's limit."""
    depth, layer = 0, [value]
    while layer and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for one in layer:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        depth, layer = depth + 1, inner
    return depth


def merge_objects(
    schema: Mapping[str, Any], find: Callable[[Any], Any], seen: list[Any] | None = None
) -> dict[str, Any] | None:
    """A schema with `allOf` as one without, where all are of objects with properties; else None.

    Args:
      schema: as a client wrote it.
      find: what a reference is to, or None.
      seen: references that were followed so far.
    """
    check_time()
    parts, seen = schema["allOf"], [] if seen is None else seen
    others = {name: value for name, value in schema.items() if name != "allOf"}
    if not isinstance(parts, list) or not parts or not all(isinstance(one, dict) for one in parts):
        return None
    if len(parts) == 1 and not set(others) - _DESCRIBES:
        return {**others, **parts[0]}
    properties: dict[str, Any] = {}
    merged: dict[str, Any] = {"properties": properties}
    for given in [others, *parts]:
        part = _plain_object(given, find, seen)
        if part is None:
            return None
        for name, one in part.get("properties", {}).items():
            twice = name in properties and properties[name] != one
            properties[name] = {"allOf": [properties[name], one]} if twice else one
        if "required" in part:
            merged["required"] = [*merged.get("required", []), *part["required"]]
        if "type" in part:
            merged["type"] = "object"
    return merged if properties else None


def _plain_object(part: Any, find: Callable[[Any], Any], seen: list[Any]) -> dict[str, Any] | None:
    """A schema of an object by what it lists alone, or what such a schema refers to; else None."""
    while isinstance(part, dict) and set(part) - _DESCRIBES == {"$ref"} and len(seen) < _MAX_HOPS:
        seen.append(part["$ref"])
        part = find(part["$ref"])
    if isinstance(part, dict) and "allOf" in part and len(seen) < _MAX_HOPS:
        part = merge_objects(part, find, seen)
    if not isinstance(part, dict) or set(part) - _DESCRIBES - {"type", "properties", "required"}:
        return None
    wrong = (
        part.get("type", "object") != "object"
        or not isinstance(part.get("properties", {}), dict)
        or not isinstance(part.get("required", []), list)
    )
    return None if wrong else part


def properties_named(names: Mapping[str, Any], value: Any) -> dict[str, Any] | None:
    """An object whose properties are named by one schema and have values of another.

    None if names are said by more than one of an enum, a pattern and lengths, or otherwise.
    """
    said = set(names) - {"type"}
    if said == {"enum"}:
        listed = {"properties": {one: value for one in names["enum"] if isinstance(one, str)}}
    elif said == {"pattern"}:
        listed = {"patternProperties": {names["pattern"]: value}}
    elif said and said <= {"minLength", "maxLength"}:
        lengths = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        listed = {"patternProperties": {f"^(?s:.{{{lengths}}})$": value}}
    else:
        return None
    return {**listed, "additionalProperties": False}


_DESCRIBES = SAYS_NOTHING | {"$id"}


def are_apart(options: Sequence[Any], shared: Mapping[str, Any]) -> bool:
    """No value can be of two of the schemas, as far as their types and constants show."""
    return len(options) <= _MAX_CHOICES and all(
        _apart(one, other, shared) for one, other in itertools.combinations(options, 2)
    )


def _apart(left: Any, right: Any, shared: Mapping[str, Any]) -> bool:
    check_time()
    left, right = (_followed(part, shared) for part in (left, right))
    if left is False or right is False:
        return True
    if not types_of(left) & types_of(right):
        return True
    values = [_constants(part, shared) for part in (left, right)]
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    if not (types_of(left) | types_of(right)) <= {"object"}:
        return False
    both = set(left.get("required", ())) & set(right.get("required", ()))
    for name in both:
        parts = [part.get("properties", {}).get(name, {}) for part in (left, right)]
        values = [_constants(part, shared) for part in parts]
        if values[0] is not None and values[1] is not None and not values[0] & values[1]:
            return True
    return False


def _followed(part: Any, shared: Mapping[str, Any]) -> Any:
    """A schema that does no more than refer to another as that other."""
    for _ in range(_MAX_HOPS):
        if not isinstance(part, dict) or set(part) != {"$ref"}:
            break
        part = shared[part["$ref"].rpartition("/")[2]]
    return part


def _constants(part: Any, shared: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema lists, as JSON; None if it lists none."""
    part = _followed(part, shared)
    if not isinstance(part, dict) or "enum" not in part:
        return None
    return {_shown(value) for value in part["enum"]}


def _shown(value: Any) -> str:
    """JSON of a value; numbers that are equal are the same."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def references_of(part: Any) -> set[str]:
    """The names of what a schema refers to anywhere in itself."""
    found, unread = set(), [part]
    while unread:
        schema = unread.pop()
        if not isinstance(schema, dict):
            continue
        if "$ref" in schema:
            found.add(schema["$ref"].rpartition("/")[2])
        for name in _MAPS:
            unread += schema.get(name, {}).values()
        for name in _LISTS:
            unread += schema.get(name, ())
        unread += [schema[name] for name in _SINGLE if name in schema]
    return found


def types_of(part: Mapping[str, Any]) -> set[str]:
    """What types a schema names by itself; integers are numbers."""
    kinds = part.get("type")
    if kinds is None:
        return set(_ALL_TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return {"number" if kind == "integer" else kind for kind in kinds}


def without_endless(root: Any, shared: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Schemas that only something endless would fulfil, such as {"$ref": "#"}, as False."""
    ending: set[str] = set()
    found = -1  # so that there is a first round
    while found < len(ending):
        found = len(ending)
        for name in reversed(shared):
            if name not in ending and _ends(shared[name], ending):
                ending.add(name)
    made = {name: _pruned(shared[name], ending) for name in ending}
    return _pruned(root, ending), made


def _ends(part: Any, ending: set[str]) -> bool:
    """A finite value may be of a schema. One that contradicts itself otherwise counts as such."""
    check_time()
    if part is False or "enum" in part:
        return True
    if "$ref" in part and part["$ref"].rpartition("/")[2] not in ending:
        return False
    if "anyOf" in part and not any(_ends(one, ending) for one in part["anyOf"]):
        return False
    if not all(_ends(one, ending) for one in part.get("allOf", ())):
        return False
    types = types_of(part)
    if types - {"array", "object"}:
        return True
    return ("array" in types and _list_ends(part, ending)) or (
        "object" in types and _object_ends(part, ending)
    )


def _list_ends(part: Mapping[str, Any], ending: set[str]) -> bool:
    least, first = part.get("minItems", 0), part.get("prefixItems", [])
    rest = least > len(first) and not _ends(part.get("items", {}), ending)
    return not rest and all(_ends(one, ending) for one in first[:least])


def _object_ends(part: Mapping[str, Any], ending: set[str]) -> bool:
    listed, others = part.get("properties", {}), part.get("additionalProperties", {})
    return all(_ends(listed.get(name, others), ending) for name in part.get("required", ()))


def _pruned(part: Any, ending: set[str]) -> Any:
    if part is False or not _ends(part, ending):
        return False
    made = dict(part)
    for name in _MAPS:
        if name in made:
            made[name] = {key: _pruned(one, ending) for key, one in made[name].items()}
    for name in _LISTS:
        if name in made:
            made[name] = [_pruned(one, ending) for one in made[name]]
    for name in _SINGLE:
        if name in made:
            made[name] = _pruned(made[name], ending)
    return made
