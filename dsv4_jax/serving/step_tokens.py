"""StepTokens: what one step drew, as columns; a `Token` is made when somebody reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from dsv4_jax.serving.request import Token


class StepTokens(Sequence[Token]):
    """Tokens of many requests, those of one in order. It equals any sequence of equal tokens."""

    def __init__(
        self, request_ids: np.ndarray, token_ids: np.ndarray, reasons: Mapping[int, str]
    ) -> None:
        """Tokens without text and log-probabilities.

        Args:
          request_ids: i64[n].
          token_ids: i32[n].
          reasons: finish reasons, by the number of the token; requests of the others go on.
        """
        self._request_ids = request_ids
        self._token_ids = token_ids
        self._reasons = reasons

    def __len__(self) -> int:
        """Tokens."""
        return len(self._token_ids)

    @overload
    def __getitem__(self, number: int) -> Token: ...

    @overload
    def __getitem__(self, number: slice) -> list[Token]: ...

    def __getitem__(self, number: int | slice) -> Token | list[Token]:
        """One token, or a list of some."""
        if isinstance(number, slice):
            return list(self)[number]
        number = range(len(self))[number]
        request_id, token_id = int(self._request_ids[number]), int(self._token_ids[number])
        return Token(request_id, token_id, self._reasons.get(number))

    def __iter__(self) -> Iterator[Token]:
        """Token by token."""
        count = len(self)
        reasons = map(self._reasons.get, range(count))
        ids, nothing = self._request_ids.tolist(), [None] * count
        fields = zip(ids, self._token_ids.tolist(), reasons, nothing, nothing, strict=True)
        return map(tuple.__new__, itertools.repeat(Token), fields)  # as `Token` does, and faster

    def __eq__(self, other: object) -> bool:
        """Whether these are the same tokens."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """As a list."""
        return repr(list(self))
