"""The lines of a grammar of Lark, while it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serving.json_schemas import MAX_SCHEMA_CHARS
from dsv4_jax.serving.schema_forms import MAX_DEPTH, depth_of


class Lines:
    """The rules of a grammar so far, and how long its schemas are together."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """No lines yet; the ids are of a tokenizer's added tokens."""
        self._token_ids = token_ids
        self._names: dict[str, str] = {}
        self._num_chars = 0

    @property
    def rules(self) -> list[str]:
        """One line each."""
        return [f"{name}: {text}" for text, name in self._names.items()]

    def rule(self, name: str, text: str) -> str:
        """Adds a rule; its name, which has a number of its own."""
        return self._names.setdefault(text, f"{name}{len(self._names)}")

    def terminal(self, text: str) -> str:
        """Adds a terminal; its name."""
        return self.rule("T", text)

    def token(self, text: str) -> str:
        """A token by its id, which text cannot stand for."""
        if text not in self._token_ids:
            raise ApiError(400, f"answers have no form here: the tokenizer has no {text}")
        return f"<[{self._token_ids[text]}]>"

    def count(self, schema: Any) -> None:
        """Refuses a schema that is too much for a server."""
        if depth_of(schema) > MAX_DEPTH:
            raise ApiError(400, f"a schema must be nested at most {MAX_DEPTH} deep")
        self._num_chars += len(json.dumps(schema))
        if self._num_chars > MAX_SCHEMA_CHARS:
            raise ApiError(400, f"schemas must have at most {MAX_SCHEMA_CHARS} characters together")
