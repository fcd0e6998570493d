"""Running: the requests that have slots, and arrays of what does not change while they run."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.schedule.known_tokens import KnownTokens
from dsv4_jax.serving.schedule.scheduler import StepRows


class Running(Mapping[int, Request]):
    """Requests by slot, the oldest first.

    Attributes:
      known: their tokens.
      requests: the requests, in order of age.
      slots: i32[n], their slots.
      totals: i32[n], tokens of prompt and longest answer.
      speculates: bool[n], drafts are checked.
      wants_logprobs: bool[n].
      has_stop_texts: bool[n].
      stops: i32[n, s], stop tokens, -1 where there are fewer.
      ids: i64[n], request ids.
      penalises: some request has penalties.
      has_grammar: bool[n].
      is_constrained: some request has one.
      is_simple: no request asks for more than a temperature and min-p.
      draws_simply: none does but for grammars.
      with_siblings: samples of one prompt that were submitted together.
    """

    def __init__(self, by_slot: Mapping[int, Request], known: KnownTokens) -> None:
        """Of requests in slots."""
        self.known = known
        self.requests: Sequence[Request] = sorted(
            by_slot.values(), key=operator.attrgetter("request_id")
        )
        self._by_slot = dict(by_slot)
        requests, count = self.requests, len(by_slot)
        self.slots = np.array([request.slot for request in requests], np.int32)
        self.totals = np.array([len(request.token_ids) for request in requests], np.int32)
        self.speculates = np.array([request.speculate for request in requests], bool)
        self.wants_logprobs = np.array(
            [request.sampling.logprobs is not None for request in requests], bool
        )
        self.has_stop_texts = np.array(
            [bool(request.sampling.stop_texts) for request in requests], bool
        )
        stops = [request.sampling.stop_token_ids or () for request in requests]
        self.stops = np.full((count, max(map(len, stops), default=0)), -1, np.int32)
        for row, tokens in zip(self.stops, stops, strict=True):
            row[: len(tokens)] = tuple(tokens)
        self.ids = np.array([request.request_id for request in requests], np.int64)
        self.has_grammar = np.array(
            [request.sampling.grammar is not None for request in requests], bool
        )
        self.is_constrained = bool(self.has_grammar.any())
        self.penalises = any(request.sampling.penalises for request in requests)
        self.draws_simply = all(
            request.sampling.with_plain(grammar=None).is_simple for request in requests
        )
        self.is_simple = self.draws_simply and not self.is_constrained
        self.with_siblings = [request for request in requests if request.siblings]

    @property
    def num_known(self) -> np.ndarray:
        """i32[n], tokens that each request knows now."""
        return self.known.num_known[self.slots]

    def logprobs_are_wanted(self, rows: StepRows) -> bool:
        """Whether a row that draws asks for log-probabilities; a step without rows tries them."""
        asking = self.slots[self.wants_logprobs]
        return not len(rows) or bool(len(asking) and np.isin(rows.slots[rows.draws], asking).any())

    def __getitem__(self, slot: int) -> Request:
        """The request in a slot."""
        return self._by_slot[slot]

    def __iter__(self) -> Iterator[int]:
        """Slots."""
        return iter(self._by_slot)

    def __len__(self) -> int:
        """Requests."""
        return len(self._by_slot)
