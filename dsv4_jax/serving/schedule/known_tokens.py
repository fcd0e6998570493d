"""KnownTokens: what running requests know, in arrays over slots, so that a step adds to all."""

from __future__ import annotations

import numpy as np

from dsv4_jax.serving.requests.calls import UndoLog
from dsv4_jax.serving.requests.request import Request


class KnownTokens:
    """Tokens of the requests in slots, how many there are, and when the last ones were drawn.

    While a request has a slot, its `token_ids` and `num_known` are views of these arrays.

    Attributes:
      token_ids: i32[NS, C], prompts and what was drawn; what follows them means nothing.
      num_known: i32[NS], how many of those are known.
      last_token_s: f64[NS], when each slot's request drew its last token, in seconds; NaN before
        the first.
      holds_text: bool[NS], the last tokens have not given all of their text yet.
    """

    def __init__(self, num_slots: int, max_context_tokens: int) -> None:
        """NS free slots for contexts of at most C tokens."""
        self.token_ids = np.zeros((num_slots, max_context_tokens), np.int32)
        self.num_known = np.zeros(num_slots, np.int32)
        self.last_token_s = np.full(num_slots, np.nan)
        self.holds_text = np.zeros(num_slots, bool)

    def enter(self, request: Request, undo: UndoLog) -> None:
        """A request has got a slot, and was saved; its tokens move here.

        Who had the slot before may have left in the same change. So the row is saved too.
        """
        at, known = slice(request.slot, request.slot + 1), request.known
        row = self.token_ids[request.slot, : len(request.token_ids)]
        for array in (row, self.num_known[at], self.last_token_s[at], self.holds_text[at]):
            undo.save_array(array)
        row[: len(known)] = known
        self.num_known[at] = len(known)
        self.last_token_s[at] = np.nan if request.last_token_s is None else request.last_token_s
        self.holds_text[at] = request.holds_text
        request.move(row, self.num_known[at])

    def leave(self, request: Request) -> None:
        """A request is about to leave its slot; its tokens are its own again.

        Once more does no harm, nor does an interrupt.
        """
        time_s = self.last_token_s[request.slot]
        request.last_token_s = None if np.isnan(time_s) else float(time_s)
        own = np.zeros_like(request.token_ids)
        own[: request.num_known] = request.known
        request.move(own, None)

    def add(
        self, slots: np.ndarray, drawn: np.ndarray, count: np.ndarray, now: float, undo: UndoLog
    ) -> None:
        """Requests in slots have drawn tokens.

        Args:
          slots: i32[n], no slot twice.
          drawn: i32[n, m], tokens of each.
          count: i[n], how many of them count.
          now: time in seconds.
          undo: saves what changes.
        """
        ends = self.num_known[slots]
        if drawn.shape[1] == 1:
            self.token_ids[slots, ends] = drawn[:, 0]
        else:
            rows, order = np.nonzero(np.arange(drawn.shape[1]) < count[:, None])
            self.token_ids[slots[rows], ends[rows] + order] = drawn[rows, order]
        undo.save_array(self.num_known)
        undo.save_array(self.last_token_s)
        self.num_known[slots] = ends + count
        self.last_token_s[slots] = now
