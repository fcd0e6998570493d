"""How a request draws: fields that protocols share, as `SamplingParams`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from dsv4_jax.rules import rules_of
from dsv4_jax.serve.errors import refuse
from dsv4_jax.serve.fields import (
    read_by,
    read_flag,
    read_integer,
    read_number,
    read_texts,
    within,
)
from dsv4_jax.serving.requests.prompts import MAX_TOKENS
from dsv4_jax.step.sampling import SamplingParams
from dsv4_jax.step.setting_values import MAX_LOGIT_BIAS, MAX_STOP_CHARS

MAX_STOPS = 16
"""Stop texts of a request."""

DRAWN = {name: ruled.http for name, ruled in rules_of(SamplingParams).items() if ruled.http}
"""Fields of a body that are settings of the same name, and what they may hold there."""

_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
"""Where bodies have others than `SamplingParams`."""


def read_sampling(body: Mapping[str, Any], *, max_new_tokens: int, **fields: Any) -> SamplingParams:
    """The settings of a request.

    Args:
      body: fields that were checked.
      max_new_tokens: most tokens to draw.
      **fields: fields of `SamplingParams` that the protocol reads by itself; `temperature` and
        `top_p` are its defaults.

    Raises:
      ApiError: a field is out of range.
    """
    defaults = _DEFAULTS | {"seed": secrets.randbits(31)} | fields
    settings: dict[str, Any] = {
        name: read_by(rule, body, name, defaults.get(name, getattr(SamplingParams, name)))
        for name, rule in DRAWN.items()
    }
    settings["top_k"] = max(0, settings["top_k"])  # -1 is none, too
    settings["logit_bias"] = _read_bias(body)
    if read_flag(body, "ignore_eos"):
        if fields.get("grammar") is not None:
            refuse("ignore_eos", "must be false where the answer's form is given")
        settings["stop_token_ids"] = ()
    try:
        return SamplingParams(max_new_tokens=max_new_tokens, **fields | settings)
    except ValueError as error:  # within a range and no setting, such as 1e-40
        name = str(error).split()[0]
        refuse(name, str(error).removeprefix(f"{name} "))


def read_stops(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """The stop texts of a request."""
    return read_texts(body, name, MAX_STOPS, MAX_STOP_CHARS)


def read_max_tokens(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """The most tokens to draw."""
    return read_integer(body, name, 1, MAX_TOKENS, default)


def _read_bias(body: Mapping[str, Any]) -> dict[int, float]:
    bias = body.get("logit_bias", {})
    rule = f"must be an object of at most {MAX_LOGIT_BIAS} token ids with numbers"
    if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS:
        refuse("logit_bias", rule)
    if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in bias):
        refuse("logit_bias", rule)
    named = within(body, "logit_bias")
    return {int(token): read_number(named, f"logit_bias.{token}", -100, 100, 0.0) for token in bias}
