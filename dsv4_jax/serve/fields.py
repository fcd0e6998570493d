"""Which fields of a protocol are obeyed, which ask for nothing, and which are refused by name.

Rules make a tree: one of an object has rules for its fields, one of a list has a rule for what the
list holds. `read` takes a value by its rule. What it gives has no null, since a field that is null
is absent, and nothing that need not reach the model. What the caller wrote in its own words, such
as a schema or the arguments of a call, is not looked into.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dsv4_jax import checks, rules
from dsv4_jax.serve.errors import ApiError, refuse


def _always(value: Any) -> bool:
    return True


def _never(value: Any) -> bool:
    return False


TYPES = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}
"""Types of JSON, as errors call them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a field may hold, and what becomes of it.

    Attributes:
      types: of a value, some of `TYPES`; () is any.
      is_needed: an object has this field.
      accepts: whether a value is taken.
      told: what is said of one that is not.
      error_code: what clients of Anthropic's look for in that error, or None.
      is_dropped: a value that is taken asks for nothing, and reaches nothing.
      is_left_out: which values ask for something without which the model can be asked: they are
        dropped too, and the log names them.
      fields: of an object; None where nothing is said of them.
      is_closed: fields that it does not have are refused.
      each: of what a list holds.
      kinds: of an object, by its kind; None is one that does not say it.
      kind_field: the field of an object that says its kind.
      null: makes what null stands for; None where the field is absent then.
    """

    types: tuple[type, ...] = ()
    is_needed: bool = False
    accepts: Callable[[Any], bool] = _always
    told: str = ""
    error_code: str | None = None
    is_dropped: bool = False
    is_left_out: Callable[[Any], bool] = _never
    fields: Mapping[str, Rule] | None = None
    is_closed: bool = False
    each: Rule | None = None
    kinds: Mapping[str | None, Rule] | None = None
    kind_field: str = "type"
    null: Callable[[], Any] | None = None


ANY = Rule()
"""A field that is read elsewhere, or is the caller's own words."""

TEXT, FLAG, OBJECT = Rule(types=(str,)), Rule(types=(bool,)), Rule(types=(dict,))

NAME = Rule(types=(str,), accepts=bool, told="must not be empty")

NOTHING = Rule(is_dropped=True)
"""A field that asks for nothing, whatever it holds: it describes the caller, or hints at caches."""


def only(*values: Any, told: str = "") -> Rule:
    """A field of which some values can be obeyed; `told` says what is missing for others."""
    shown = " or ".join(map(repr, values))
    return Rule(accepts=_is_among(values), told=f"must be {shown}{told and f'; {told}'}")


def aside(
    *nothing: Any,
    types: tuple[type, ...] = (),
    accepts: Callable[[Any], bool] = _always,
    told: str = "",
) -> Rule:
    """A field without which the model can be asked: it is left out, and the log says so.

    Args:
      *nothing: values that ask for what is there anyway, of which the log says nothing.
      types: of values that are taken.
      accepts: which of them are taken.
      told: what is said of others.
    """
    is_nothing = _is_among(nothing)
    return Rule(
        types=types,
        accepts=accepts,
        told=told,
        is_dropped=True,
        is_left_out=lambda value: not is_nothing(value),
    )


def missing(what: str, *, error_code: str | None = None) -> Rule:
    """A field of the protocol that asks for what this server does not have."""
    return Rule(
        accepts=lambda value: value in ([], {}, ""),
        told=f"is not supported: {what}",
        error_code=error_code,
        is_dropped=True,
    )


def needed(rule: Rule) -> Rule:
    """A field that an object must have."""
    return dataclasses.replace(rule, is_needed=True)


def fields_of(**rules: Rule) -> Rule:
    """An object of those fields, and of others, which are its writer's and are left out."""
    return Rule(types=(dict,), fields=rules)


def closed(**rules: Rule) -> Rule:
    """An object of those fields and no other."""
    return Rule(types=(dict,), fields=rules, is_closed=True)


def listed(each: Rule) -> Rule:
    """A list."""
    return Rule(types=(list,), each=each)


def text_or(each: Rule) -> Rule:
    """A text, or a list instead of it."""
    return Rule(types=(str, list), each=each)


def one_of(
    kinds: Mapping[str | None, Rule],
    *,
    names: Sequence[str] | None = None,
    told: str = "",
    field: str = "type",
) -> Rule:
    """An object of one of some kinds, or one of some names.

    Args:
      kinds: rules by kind.
      names: texts that are taken instead of an object; with None there are none.
      told: why other kinds are refused.
      field: says an object's kind.
    """
    shown = [f'{{"{field}": "{kind}"}}' for kind in kinds if kind is not None]
    rule = "must be " + " or ".join([*map(repr, names or ()), *shown])
    if names is None:
        return Rule(types=(dict,), kinds=kinds, told=told or rule, kind_field=field)
    taken = _is_among(names)
    return Rule(
        accepts=lambda value: (
            kind_of(value, field) in kinds if isinstance(value, dict) else taken(value)
        ),
        told=rule + (told and f"; {told}"),
        kinds=kinds,
        kind_field=field,
    )


def kind_of(value: Mapping[str, Any], field: str = "type") -> str | None:
    """Its kind, without the date that some types have: `web_search_20250305` is `web_search`."""
    kind = value.get(field)
    if kind is None:
        return None
    return re.sub(r"_\d{4}_?\d{2}_?\d{2}$", "", kind) if isinstance(kind, str) else ""


def _is_among(values: Sequence[Any]) -> Callable[[Any], bool]:
    return lambda value: any(value == one and type(value) is type(one) for one in values)


_GONE = object()

_MAX_LEFT_OUT = 50
"""Names in a log line; clients can invent any number."""


def read(value: Any, rule: Rule, name: str, left_out: list[str]) -> Any:
    """A value without what need not reach the model; errors call it by that name.

    Args:
      value: of JSON.
      rule: what it may hold.
      name: as in `messages[3].content`.
      left_out: is added the names of fields and kinds that asked for something and are left out.

    Raises:
      ApiError: it holds what cannot be obeyed.
    """
    found = _read(value, rule, name, left_out)
    return None if found is _GONE else found


def _read(value: Any, rule: Rule, name: str, left_out: list[str]) -> Any:
    if rule.types and not isinstance(value, rule.types):
        refuse(name, "must be " + " or ".join(TYPES[one] for one in rule.types))
    if not rule.accepts(value):
        refuse(name, rule.told, error_code=rule.error_code)
    if rule.is_left_out(value):
        _note(name, left_out)
        return _GONE
    if rule.is_dropped:
        return _GONE
    if isinstance(value, list):
        if rule.each is None:
            return value
        found = [_read(one, rule.each, f"{name}[{i}]", left_out) for i, one in enumerate(value)]
        return [one for one in found if one is not _GONE]
    if not isinstance(value, dict):
        return value
    if rule.kinds is not None:
        kind = kind_of(value, rule.kind_field)
        inner = rule.kinds.get(kind)
        if inner is None:
            _refuse_kind(value.get(rule.kind_field), rule, name)
        if inner.is_left_out(value):
            _note(f"{name} ({kind})", left_out)
            return _GONE
        return _read(value, inner, name, left_out)
    return value if rule.fields is None else _read_fields(value, rule, f"{name}.", left_out)


def _read_fields(
    value: Mapping[str, Any], rule: Rule, prefix: str, left_out: list[str]
) -> dict[str, Any]:
    kept = {}
    assert rule.fields is not None
    for name, one in value.items():
        inner = rule.fields.get(name)
        if one is None:
            if inner is None or inner.null is None:
                continue
            one = inner.null()
        if inner is not None:
            one = _read(one, inner, prefix + name, left_out)
        elif rule.is_closed:
            where = prefix + name[:64]
            raise ApiError(400, f"there is no field {checks.shown(where)} here", param=where)
        else:
            _note(prefix + name[:64], left_out)
            one = _GONE
        if one is not _GONE:
            kept[name] = one
    for name, inner in rule.fields.items():
        if inner.is_needed and name not in kept:
            refuse(prefix + name, "must be given")
    return kept


def _refuse_kind(given: Any, rule: Rule, name: str) -> NoReturn:
    assert rule.kinds is not None
    where = f"{name}.{rule.kind_field}"
    if given is None:
        shown = ", ".join(json.dumps(kind) for kind in rule.kinds if kind is not None)
        refuse(where, f"must be given, as one of {shown}")
    refuse(where, f"{json.dumps(given)[:64]} is not supported: {rule.told}")


def _note(name: str, left_out: list[str]) -> None:
    name = re.sub(r"\[\d+\]", "[]", name)
    if name not in left_out and len(left_out) < _MAX_LEFT_OUT:
        left_out.append(name)


def check_fields(
    body: Mapping[str, Any], rules: Mapping[str, Rule], left_out: list[str] | None = None
) -> dict[str, Any]:
    """The fields of a body, as `read` gives them.

    Args:
      body: what came.
      rules: of its fields.
      left_out: is added the names of what is left out.

    Raises:
      ApiError: one is unknown, or holds what cannot be obeyed.
    """
    rule = Rule(fields=rules, is_closed=True)
    return _read_fields(body, rule, "", [] if left_out is None else left_out)


def within(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a field that is an object, by the names that errors call them."""
    return {f"{name}.{inner}": value for inner, value in body.get(name, {}).items()}


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false if it is absent."""
    value = body.get(name, False)
    return value if isinstance(value, bool) else _wrong(name, "true or false", value)


def read_by(rule: rules.Rule, body: Mapping[str, Any], name: str, default: Any) -> Any:
    """What a rule of `SamplingParams` says."""
    match rule:
        case rules.Whole(least=int() as least, most=int() as most):
            return read_integer(body, name, least, most, default)
        case rules.Real(most=float() | int() as most):
            return read_number(body, name, rule.least, most, default)
        case rules.Texts():
            return _read_texts(rule, body.get(name, default), name)
        case rules.NumberByToken():
            return _read_numbers(rule, body, name) if name in body else default
    raise TypeError(f"a body holds nothing by {rule}")


def read_integer(
    body: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None
) -> int | None:
    """A whole number of that range."""
    value = body.get(name, default)
    if value is None or (type(value) is int and low <= value <= high):
        return value
    _wrong(name, f"a whole number from {low} to {high}", value)


def read_number(
    body: Mapping[str, Any], name: str, low: float, high: float, default: float
) -> float:
    """A number of that range."""
    value = body.get(name, default)
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value <= high
        and math.isfinite(value)
    ):
        return float(value)
    _wrong(name, f"a number from {low:g} to {high:g}", value)


def _read_texts(rule: rules.Texts, value: Any, name: str) -> tuple[str, ...]:
    """One text or a list of them."""
    texts = [value] if isinstance(value, str) else value
    told = f"at most {rule.most} texts of 1 to {rule.max_chars} characters"
    if not isinstance(texts, list | tuple) or len(texts) > rule.most:
        _wrong(name, told, value)
    if not all(isinstance(text, str) and 1 <= len(text) <= rule.max_chars for text in texts):
        _wrong(name, told, value)
    return tuple(texts)


def _read_numbers(
    rule: rules.NumberByToken, body: Mapping[str, Any], name: str
) -> dict[int, float]:
    """An object, whose fields are token ids in decimal digits."""
    given = body[name]
    told = f"must be an object of at most {rule.count} token ids with numbers"
    if not isinstance(given, dict) or len(given) > rule.count:
        refuse(name, told)
    if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in given):
        refuse(name, told)
    numbers = within(body, name)
    return {
        int(token): read_number(numbers, f"{name}.{token}", rule.least, rule.most, 0.0)
        for token in given
    }


def _wrong(name: str, rule: str, value: Any) -> NoReturn:
    refuse(name, f"must be {rule}, got {checks.shown(value)}")
