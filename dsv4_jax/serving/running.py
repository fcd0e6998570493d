"""Running: the requests that have slots, and arrays of what does not change while they run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dsv4_jax.serving.calls import UndoLog
from dsv4_jax.serving.request import Request


class Running(Mapping[int, Request]):
    """Requests by slot, the oldest first.

    Attributes:
      requests: the requests, in order of age.
      slots: i32[n], their slots.
      totals: i32[n], tokens of prompt and longest answer.
      speculates: bool[n], drafts are checked.
      wants_logprobs: bool[n].
      stops: i32[n, s], stop tokens, -1 where there are fewer.
      ids: i64[n], request ids.
      penalises: some request has penalties.
      is_constrained: some request has a grammar.
      with_siblings: samples of one prompt that were submitted together.
    """

    def __init__(self, by_slot: Mapping[int, Request]) -> None:
        """Of requests in slots."""
        self.requests: Sequence[Request] = sorted(by_slot.values(), key=_age)
        self._by_slot = dict(by_slot)
        requests, count = self.requests, len(by_slot)
        self.slots = np.array([one.slot for one in requests], np.int32)
        self.totals = np.array([len(one.token_ids) for one in requests], np.int32)
        self.speculates = np.array([one.speculate for one in requests], bool)
        self.wants_logprobs = np.array(
            [one.sampling.logprobs is not None for one in requests], bool
        )
        stops = [one.sampling.stop_token_ids or () for one in requests]
        self.stops = np.full((count, max(map(len, stops), default=0)), -1, np.int32)
        for row, tokens in zip(self.stops, stops, strict=True):
            row[: len(tokens)] = tuple(tokens)
        self.ids = np.array([one.request_id for one in requests], np.int64)
        self.is_constrained = any(one.sampling.grammar is not None for one in requests)
        self.penalises = any(one.sampling.penalises for one in requests)
        self._num_known: np.ndarray | None = None
        self._last_token_s: np.ndarray | None = None
        self.with_siblings = [one for one in requests if one.siblings]

    @property
    def num_known(self) -> np.ndarray:
        """i32[n], tokens that each request knows now."""
        if self._num_known is None:
            known = [one.num_known for one in self.requests]
            self._num_known = np.array(known, np.int32)
        return self._num_known

    @property
    def last_token_s(self) -> np.ndarray:
        """f64[n], when each request drew its last token, in seconds; NaN before the first."""
        if self._last_token_s is None:
            times = [one.last_token_s for one in self.requests]
            self._last_token_s = np.array(times, np.float64)
        return self._last_token_s

    def draw(self, places: np.ndarray, num_tokens: np.ndarray, now: float, undo: UndoLog) -> None:
        """Requests with these numbers know so many more tokens, which have been counted for them.

        When they drew them is noted here, until `write_back`.
        """
        known, times = self.num_known.copy(), self.last_token_s.copy()
        known[places] += num_tokens
        times[places] = now
        self._save(undo)
        self._num_known, self._last_token_s = known, times

    def write_back(self, undo: UndoLog) -> None:
        """Tells the requests when they drew, and forgets what they say."""
        if self._last_token_s is not None:
            noted = [one.last_token_s for one in self.requests]
            undo.save_column(self.requests, "last_token_s", noted)
            times = self._last_token_s.tolist()
            for request, time_s in zip(self.requests, times, strict=True):
                request.last_token_s = None if math.isnan(time_s) else time_s
        self.refresh(undo)

    def refresh(self, undo: UndoLog) -> None:
        """Forgets what requests said, which others have changed."""
        self._save(undo)
        self._num_known = self._last_token_s = None

    def _save(self, undo: UndoLog) -> None:
        undo.save_item(vars(self), "_num_known")
        undo.save_item(vars(self), "_last_token_s")

    def __getitem__(self, slot: int) -> Request:
        """The request in a slot."""
        return self._by_slot[slot]

    def __iter__(self) -> Iterator[int]:
        """Slots."""
        return iter(self._by_slot)

    def __len__(self) -> int:
        """Requests."""
        return len(self._by_slot)


def _age(request: Request) -> int:
    return request.request_id
