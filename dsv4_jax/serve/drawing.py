"""How a request draws: fields that protocols share, as `SamplingParams`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from dsv4_jax.serve.errors import refuse
from dsv4_jax.serve.fields import read_flag, read_integer, read_number, read_texts, within
from dsv4_jax.step.sampling import MAX_STOP_CHARS, SamplingParams

MAX_STOPS = 16
"""Stop texts of a request."""

MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 300
_MAX_TOKENS = 2**24


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
    settings: dict[str, Any] = {
        "temperature": read_number(body, "temperature", 0, 2, fields.pop("temperature", 1.0)),
        "top_p": read_number(body, "top_p", 0, 1, fields.pop("top_p", 1.0)),
        "top_k": max(0, read_integer(body, "top_k", -1, 2**31 - 1, 0) or 0),  # -1 is none, too
        "min_p": read_number(body, "min_p", 0, 1, 0.0),
        "seed": read_integer(body, "seed", -(2**63), 2**63 - 1, secrets.randbits(31)),
        "presence_penalty": read_number(body, "presence_penalty", -2, 2, 0.0),
        "frequency_penalty": read_number(body, "frequency_penalty", -2, 2, 0.0),
        "logit_bias": _read_bias(body),
    }
    if read_flag(body, "ignore_eos"):
        if fields.get("grammar") is not None:
            refuse("ignore_eos", "must be false where the answer's form is given")
        settings["stop_token_ids"] = ()
    try:
        return SamplingParams(max_new_tokens=max_new_tokens, **settings, **fields)
    except ValueError as error:  # within a range and no setting, such as 1e-40
        name = str(error).split()[0]
        refuse(name, str(error).removeprefix(f"{name} "))


def read_stops(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """The stop texts of a request."""
    return read_texts(body, name, MAX_STOPS, MAX_STOP_CHARS)


def read_max_tokens(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """The most tokens to draw."""
    return read_integer(body, name, 1, _MAX_TOKENS, default)


def _read_bias(body: Mapping[str, Any]) -> dict[int, float]:
    bias = body.get("logit_bias", {})
    rule = f"must be an object of at most {MAX_BIASED_TOKENS} token ids with numbers"
    if not isinstance(bias, dict) or len(bias) > MAX_BIASED_TOKENS:
        refuse("logit_bias", rule)
    if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in bias):
        refuse("logit_bias", rule)
    named = within(body, "logit_bias")
    return {int(token): read_number(named, f"logit_bias.{token}", -100, 100, 0.0) for token in bias}
