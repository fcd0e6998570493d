"""Which fields of which protocol are obeyed; whatever is not is refused by name.

A field that is null is absent. A rule says which other values can be obeyed: `ANY` for fields that
are read, and for those that describe the caller and ask for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from dsv4_jax import checks
from dsv4_jax.serve.errors import ApiError, refuse


class Rule(NamedTuple):
    """What a field may hold.

    Attributes:
      accepts: whether a value can be obeyed.
      told: what is said of one that cannot.
    """

    accepts: Callable[[Any], bool]
    told: str


ANY = Rule(lambda value: True, "")


def only(*values: Any, told: str = "") -> Rule:
    """A field of which some values can be obeyed; `told` says what is missing for others."""
    shown = " or ".join(map(repr, values))
    return Rule(
        lambda value: any(value == one and type(value) is type(one) for one in values),
        f"must be {shown}{told and f'; {told}'}",
    )


def typed(*kinds: str, names: Sequence[str] = ()) -> Rule:
    """A field that is an object of one of some types, or one of some names."""
    shown = " or ".join([*map(repr, names), *(f'{{"type": "{kind}"}}' for kind in kinds)])
    return Rule(
        lambda value: value in names if isinstance(value, str) else _type_of(value) in kinds,
        f"must be {shown}",
    )


def _type_of(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def missing(what: str) -> Rule:
    """A field of the protocol that asks for what this server does not have."""
    return Rule(lambda value: value in ([], {}), f"is not supported: {what}")


_NO_STORE = "answers are not stored"
_CHOICE = typed("function", names=("auto", "none", "required"))
_EXTRAS = {"seed": ANY, "top_k": ANY, "min_p": ANY, "ignore_eos": ANY}
_DRAWING = _EXTRAS | {
    "temperature": ANY,
    "top_p": ANY,
    "logit_bias": ANY,
    "presence_penalty": ANY,
    "frequency_penalty": ANY,
}
_CALLER = {"user": ANY, "service_tier": only("auto", "default")}

COMPLETIONS = {
    **_DRAWING,
    **_CALLER,
    "model": ANY,
    "prompt": ANY,
    "max_tokens": ANY,
    "n": ANY,
    "best_of": ANY,
    "stream": ANY,
    "stream_options": ANY,
    "logprobs": ANY,
    "echo": ANY,
    "stop": ANY,
    "suffix": missing("the model does not fill in the middle"),
}
CHAT = {
    **_DRAWING,
    **_CALLER,
    "model": ANY,
    "messages": ANY,
    "thinking": ANY,
    "reasoning_effort": ANY,
    "tools": ANY,
    "tool_choice": _CHOICE,
    "parallel_tool_calls": only(True, False),
    "response_format": typed("text", "json_object", "json_schema"),
    "max_tokens": ANY,
    "max_completion_tokens": ANY,
    "n": ANY,
    "stop": ANY,
    "stream": ANY,
    "stream_options": ANY,
    "logprobs": ANY,
    "top_logprobs": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "modalities": only(["text"]),
    "store": only(False, told=_NO_STORE),
    "metadata": missing(_NO_STORE),
    "functions": missing("use tools"),
    "function_call": missing("use tool_choice"),
    "audio": missing("answers are text"),
    "prediction": missing("there are no predicted outputs"),
    "web_search_options": missing("there is no search"),
    "verbosity": missing("the model knows no verbosity"),
}
RESPONSES = {
    **_EXTRAS,
    **_CALLER,
    "model": ANY,
    "input": ANY,
    "instructions": ANY,
    "reasoning": ANY,
    "tools": ANY,
    "tool_choice": _CHOICE,
    "parallel_tool_calls": only(True, False),
    "text": ANY,
    "max_output_tokens": ANY,
    "temperature": ANY,
    "top_p": ANY,
    "stream": ANY,
    "top_logprobs": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "include": only([], ["message.output_text.logprobs"]),
    "store": only(False, told=_NO_STORE),
    "background": only(False, told=_NO_STORE),
    "truncation": only("disabled"),
    "metadata": missing(_NO_STORE),
    "previous_response_id": missing(_NO_STORE),
    "conversation": missing(_NO_STORE),
    "prompt": missing(_NO_STORE),
    "max_tool_calls": missing("the server calls no tools"),
    "stream_options": only({}, {"include_obfuscation": False}),
}
MESSAGES = {
    **_EXTRAS,
    "model": ANY,
    "messages": ANY,
    "system": ANY,
    "max_tokens": ANY,
    "stop_sequences": ANY,
    "temperature": ANY,
    "top_p": ANY,
    "stream": ANY,
    "metadata": ANY,
    "thinking": ANY,
    "output_config": ANY,
    "tools": ANY,
    "tool_choice": typed("auto", "none", "any", "tool"),
    "service_tier": only("auto", "standard_only"),
    "output_format": missing("use /v1/chat/completions for JSON schemas"),
    "container": missing("there are no containers"),
    "mcp_servers": missing("the server calls no tools"),
    "context_management": missing("conversations are taken as they are"),
    "inference_geo": missing("there is one place"),
}
TOKENIZE = {"model": ANY, "prompt": ANY, "add_special_tokens": ANY}
DETOKENIZE = {"model": ANY, "tokens": ANY}


def check_fields(body: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """The fields that are not null.

    Raises:
      ApiError: one is unknown, or holds what cannot be obeyed.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        rule = rules.get(name)
        if rule is None:
            raise ApiError(400, f"there is no field {checks.shown(name)} here", param=name[:64])
        if not rule.accepts(value):
            refuse(name, rule.told)
    return given


def check_inner(value: Any, name: str, allowed: Mapping[str, Rule]) -> dict[str, Any]:
    """The fields of a field that is an object, by rules of their own."""
    if not isinstance(value, dict):
        refuse(name, "must be an object")
    for inner, one in value.items():
        if inner not in allowed or (one is not None and not allowed[inner].accepts(one)):
            told = allowed[inner].told if inner in allowed else "there is no such field here"
            refuse(f"{name}.{inner[:64]}", told)
    return {inner: one for inner, one in value.items() if one is not None}


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false if it is absent."""
    value = body.get(name, False)
    return value if isinstance(value, bool) else _wrong(name, "true or false", value)


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


def read_texts(
    body: Mapping[str, Any], name: str, max_texts: int, max_chars: int
) -> tuple[str, ...]:
    """One text or a list of them; none if it is absent."""
    value = body.get(name, [])
    texts = [value] if isinstance(value, str) else value
    rule = f"at most {max_texts} texts of 1 to {max_chars} characters"
    if not isinstance(texts, list) or len(texts) > max_texts:
        _wrong(name, rule, value)
    if not all(isinstance(text, str) and 1 <= len(text) <= max_chars for text in texts):
        _wrong(name, rule, value)
    return tuple(texts)


def _wrong(name: str, rule: str, value: Any) -> NoReturn:
    refuse(name, f"must be {rule}, got {checks.shown(value)}")
