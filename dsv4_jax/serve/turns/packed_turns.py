"""PackedTurns: what an answer is made by, of a conversation that another process has read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import deepseek_recipe as recipe

from dsv4_jax.serve.turns.digits import Digits

SHORT_TURNS = ({"role": "user", "content": "json"},)
"""A conversation that every protocol takes; the library wants that word for an answer in JSON."""


class PackedTurns(NamedTuple):
    """A conversation without what only its prompt is made by; it pickles.

    The library's objects do not. It makes them anew of the fields that the request has, and of
    a short conversation.

    Attributes:
      fields: those that the library reads.
      parsing: values of the library's `ParsingOptions`, by name.
      stage: name of the one where the answer begins, or None.
      digits: numbers that the library does not hold.
      continues_text: the answer goes on with a text.
      field: of the body, that holds the conversation.
    """

    fields: Mapping[str, Any]
    parsing: Mapping[str, Any]
    stage: str | None
    digits: Digits
    continues_text: bool
    field: str


_PARSING = ("parse_tool_calls", "starts_in_tool_calls", "parse_json_output", "stop_sequences")


def pack_parsing(parsing: recipe.ParsingOptions) -> tuple[dict[str, Any], str | None]:
    """Values by name, and the name of the stage where the answer begins."""
    stage = parsing.thinking_initial_stage
    values = {name: getattr(parsing, name) for name in _PARSING}
    return values, None if stage is None else str(stage).rpartition(".")[2]


def unpack_parsing(
    values: Mapping[str, Any], stage: str | None, parsing: recipe.ParsingOptions
) -> recipe.ParsingOptions:
    """Options of another conversation with those values."""
    for name in _PARSING:
        setattr(parsing, name, values[name])
    stages = recipe.ThinkingInitialStage
    parsing.thinking_initial_stage = None if stage is None else getattr(stages, stage)
    return parsing
