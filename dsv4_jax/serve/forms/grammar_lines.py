"""The lines of a grammar of Lark, while it is written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence

from dsv4_jax.schemas.read_schema import MAX_SCHEMA_CHARS, Schema, SchemaError
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.forms.tags import V4_TAGS, Tags
from dsv4_jax.step.grammar import MAX_CHARS

_LINE_CHARS = 24
"""Of the name of a rule, and of what is between names and texts."""


class Lines:
    """The rules of a grammar so far, and how long its schemas are together.

    Attributes:
      tags: of calls, as the model names them.
    """

    def __init__(
        self, token_ids: Mapping[str, int], *, num_reserved: int = 0, tags: Tags = V4_TAGS
    ) -> None:
        """No lines yet.

        Args:
          token_ids: the ids of a tokenizer's added tokens.
          num_reserved: characters of the grammar that schemas must leave to the rest of it.
          tags: of calls.
        """
        self.tags = tags
        self._token_ids = token_ids
        self._room = MAX_CHARS - num_reserved
        self._names: dict[str, str] = {}
        self._num_chars = 0

    @property
    def rules(self) -> list[str]:
        """One line each."""
        return [f"{name}: {text}" for text, name in self._names.items()]

    def rule(self, name: str, text: str) -> str:
        """Adds a rule if there is none of the same text; its name, which has a number."""
        if text not in self._names:
            self._names[text] = f"{name}{len(self._names)}"
            self._room -= len(text) + _LINE_CHARS
        return self._names[text]

    def terminal(self, text: str) -> str:
        """Adds a terminal; its name."""
        return self.rule("T", text)

    @contextlib.contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Takes back what was added and counted inside, if a schema is refused there."""
        num_names, room, num_chars = len(self._names), self._room, self._num_chars
        try:
            yield
        except SchemaError:
            while len(self._names) > num_names:
                self._names.popitem()
            self._room, self._num_chars = room, num_chars
            raise

    def check_room(self, bodies: Sequence[str]) -> None:
        """Refuses what would make a grammar that is longer than an engine takes.

        Raises:
          SchemaError: there is no room for one more tool with these parameters.
        """
        if sum(map(len, bodies)) > self._room:
            raise SchemaError("all tools together must have fewer and simpler parameters")

    def token(self, text: str) -> str:
        """A token by its id, which text cannot stand for."""
        if text not in self._token_ids:
            raise ApiError(400, f"answers have no form here: the tokenizer has no {text}")
        return f"<[{self._token_ids[text]}]>"

    def count(self, schema: Schema) -> None:
        """Counts a schema that is going to be held, without descriptions and other annotations.

        Raises:
          SchemaError: it is too long, beside the others.
        """
        self._num_chars += len(json.dumps(schema))
        if self._num_chars > MAX_SCHEMA_CHARS:
            raise SchemaError(f"schemas must have at most {MAX_SCHEMA_CHARS} characters together")
