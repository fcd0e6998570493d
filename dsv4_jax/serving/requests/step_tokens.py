"""StepTokens: what one step drew, as columns; a `Token` is made when somebody reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from dsv4_jax.serving.requests.request import Token, TokenLogprobs


class StepTokens(Sequence[Token]):
    """Tokens of many requests, those of one in order. It equals any sequence of equal tokens."""

    def __init__(
        self,
        request_ids: np.ndarray,
        token_ids: np.ndarray,
        reasons: Mapping[int, str],
        texts: np.ndarray | None = None,
        logprobs: Mapping[int, TokenLogprobs] | None = None,
    ) -> None:
        """Columns of tokens.

        Args:
          request_ids: i64[n].
          token_ids: i32[n].
          reasons: finish reasons, by the number of the token; requests of the others go on.
          texts: object[n], what each adds; None without a tokenizer.
          logprobs: by the number of the token, those of requests that asked for them.
        """
        self._request_ids = request_ids
        self._token_ids = token_ids
        self._reasons = reasons
        self._texts = texts
        self._logprobs = logprobs or {}

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
        return Token(
            int(self._request_ids[number]),
            int(self._token_ids[number]),
            self._reasons.get(number),
            None if self._texts is None else self._texts[number],
            self._logprobs.get(number),
        )

    def __iter__(self) -> Iterator[Token]:
        """Token by token."""
        numbers = range(len(self))
        fields = zip(
            self._request_ids.tolist(),
            self._token_ids.tolist(),
            map(self._reasons.get, numbers),
            [None] * len(self) if self._texts is None else self._texts.tolist(),
            map(self._logprobs.get, numbers),
            strict=True,
        )
        return map(tuple.__new__, itertools.repeat(Token), fields)  # as `Token` does, and faster

    def __eq__(self, other: object) -> bool:
        """Whether these are the same tokens."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """As a list."""
        return repr(list(self))
