"""How a request draws: fields that protocols share, as `SamplingParams`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from dsv4_jax.rules import rules_of
from dsv4_jax.serve.errors import refuse
from dsv4_jax.serve.fields import read_by, read_flag
from dsv4_jax.step.sampling import SamplingParams

_RULES = {name: ruled.http for name, ruled in rules_of(SamplingParams).items() if ruled.http}

DRAWN = {
    name: rule
    for name, rule in _RULES.items()
    if name not in ("max_new_tokens", "stop_texts", "logprobs")
}
"""Fields of a body that are settings of the same name, and what they may hold there.

The others have a name of their own in each protocol, which reads them by `read_setting`.
"""

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
        name: read_setting(name, body, name, defaults.get(name, getattr(SamplingParams, name)))
        for name in DRAWN
    }
    settings["top_k"] = max(0, settings["top_k"])  # -1 is none, too
    if read_flag(body, "ignore_eos"):
        if fields.get("grammar") is not None:
            refuse("ignore_eos", "must be false where the answer's form is given")
        settings["stop_token_ids"] = ()
    try:
        return SamplingParams(max_new_tokens=max_new_tokens, **fields | settings)
    except ValueError as error:  # within a range and no setting, such as 1e-40
        name = str(error).split()[0]
        refuse(name, str(error).removeprefix(f"{name} "))


def read_setting(setting: str, body: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field of a body that is a setting of `SamplingParams`, by whatever name; None is absent.

    Raises:
      ApiError: it is out of range.
    """
    return read_by(_RULES[setting], body, name, default)
