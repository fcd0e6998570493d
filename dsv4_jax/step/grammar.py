"""Grammar: what an answer has to be, as a value; `serving` makes masks of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Self

from dsv4_jax import checks

KINDS = ("json_schema", "regex", "lark")
MAX_CHARS = 2**18
"""The longest grammar. Schemas of this size compile for seconds."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What an answer has to be, in one of the languages that llguidance reads.

    An answer follows it token by token and ends where it does, with the model's end token. Only
    `max_new_tokens` and the request's stop texts and tokens can end it before.

    Attributes:
      kind: "json_schema"; "regex", of Rust's dialect, without anchors; or "lark", a grammar in
        llguidance's form of Lark, which may name tokens by id, as in <[128822]>.
      text: the schema as JSON, all of which is held or it is refused (docs/serving.md); the
        expression; or the grammar. At most 262,144 characters.

    Raises:
      ValueError: there is no such kind, or the text is none or too long. Whether it is a grammar
        is known when a request brings it to an engine.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.choice("kind", self.kind, KINDS)
        checks.text("text", self.text, max_chars=MAX_CHARS)

    @classmethod
    def json_schema(cls, schema: Any) -> Self:
        """Of a JSON schema, as plain dicts and lists; {"type": "object"} is any object.

        Raises:
          ValueError: it cannot be written as JSON.
        """
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            checks.refuse("schema", "a JSON schema of plain dicts, lists and values", schema)
