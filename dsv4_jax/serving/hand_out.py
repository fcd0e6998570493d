"""What a step drew, given to the requests: tokens, texts, ends, and how long they took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.serving.calls import UndoLog
from dsv4_jax.serving.metrics import Metrics, add_values
from dsv4_jax.serving.request import Request, Token, TokenLogprobs
from dsv4_jax.serving.runner import StepResult
from dsv4_jax.serving.running import Running
from dsv4_jax.serving.step_tokens import StepTokens


class HandOut:
    """One step's tokens on their way to requests.

    Attributes:
      requests: whose step it was.
      ended: those that ended with it, once it has run.
    """

    def __init__(
        self,
        running: Running,
        places: np.ndarray,
        slots: np.ndarray,
        result: StepResult,
        now: float,
        metrics: Metrics,
        undo: UndoLog,
    ) -> None:
        """Changes nothing yet.

        Args:
          running: requests when the step was launched.
          places: i64[n], numbers of those in `running` that drew.
          slots: i32[n], their rows of the result.
          result: what the step gave.
          now: time in seconds.
          metrics: counters.
          undo: saves what changes.
        """
        requests = running.requests
        if len(places) < len(requests) or np.any(places[1:] < places[:-1]):
            requests = [requests[place] for place in places.tolist()]
        self.requests = requests
        self.ended: list[Request] = []
        self._running, self._places, self._slots = running, places, slots
        self._result, self._now = result, now
        self._metrics, self._undo = metrics, undo

    def run(self, tokenizer: Tokenizer | None) -> Sequence[Token]:
        """Adds drawn tokens to requests, and sets why those that have ended did.

        With a tokenizer, or with log-probabilities, requests are served one by one.

        Returns:
          The tokens, those of a request in order.
        """
        if tokenizer is None and self._result.logprobs is None:
            return self._add_ids()
        tokens, result, known = [], self._result, self._running.known
        self._undo.save_array(known.num_known)
        self._undo.save_array(known.last_token_s)
        for request, slot in zip(self.requests, self._slots.tolist(), strict=True):
            self._undo.save(request)
            drawn = [token for token in result.token_ids[slot].tolist() if token >= 0]
            logprobs = _logprobs_of(request, slot, result, len(drawn))
            tokens += self._add_one_by_one(request, drawn, logprobs, tokenizer)
        known.last_token_s[self._slots] = self._now
        self.ended = [one for one in self.requests if one.finish_reason is not None]
        return tokens

    def _add_ids(self) -> StepTokens:
        """Where tokens are ids and nothing else: all requests at once."""
        requests, running, places = self.requests, self._running, self._places
        drawn, stops = self._result.token_ids[self._slots], running.stops[places]
        is_drawn = drawn >= 0
        num_drawn = is_drawn.sum(axis=1)
        left = running.totals[places] - running.known.num_known[self._slots]
        count = np.minimum(num_drawn, left)
        ended, stopped = num_drawn >= left, np.zeros(len(requests), bool)
        if stops.shape[1]:
            stopping = np.any(drawn[:, :, None] == stops[:, None], axis=2) & is_drawn
            first = stopping.argmax(axis=1) + 1
            stopped = stopping.any(axis=1) & (first <= left)
            count, ended = np.where(stopped, first, count), ended | stopped
        self._time(count, num_drawn)
        running.known.add(self._slots, drawn, count, self._now, self._undo)
        self._metrics.generated_tokens += int(count.sum())
        reasons, lasts = {}, np.cumsum(count) - 1
        for row in np.flatnonzero(ended).tolist():
            request = requests[row]
            self._undo.save(request)
            reasons[int(lasts[row])] = request.finish_reason = "stop" if stopped[row] else "length"
            self.ended.append(request)
        rows, order = np.nonzero(np.arange(drawn.shape[1]) < count[:, None])
        return StepTokens(running.ids[places[rows]], drawn[rows, order], reasons)

    def _time(self, count: np.ndarray, num_drawn: np.ndarray) -> None:
        """Counts the time to first tokens, and between tokens; those of one step share theirs."""
        last_s, now = self._running.known.last_token_s[self._slots], self._now
        is_first = np.isnan(last_s)
        if is_first.any():
            rows = np.flatnonzero(is_first).tolist()
            submitted = np.array([self.requests[row].submitted_s for row in rows])
            add_values(self._metrics.first_token_s, now - submitted, count[is_first])
            last_s, count = last_s[~is_first], count[~is_first]
            num_drawn = num_drawn[~is_first]
        add_values(self._metrics.token_s, (now - last_s) / num_drawn, count)

    def _add_one_by_one(
        self,
        request: Request,
        drawn: list[int],
        logprobs: Sequence[TokenLogprobs | None],
        tokenizer: Tokenizer | None,
    ) -> list[Token]:
        """Adds drawn tokens; what that raises ends this request alone."""
        tokens, metrics = [], self._metrics
        last_s, now = self._running.known.last_token_s[request.slot], self._now
        for token_id, its_logprobs in zip(drawn, logprobs, strict=True):
            try:
                request.add(token_id, tokenizer, its_logprobs)
            except Exception as error:
                request.finish_reason, request.error = "error", error
                return tokens
            tokens.append(request.token(request.num_drawn - 1))
            metrics.generated_tokens += 1
            if np.isnan(last_s):
                metrics.first_token_s.add(now - request.submitted_s)
            else:
                metrics.token_s.add((now - last_s) / len(drawn))
            if request.finish_reason is not None:
                break
        return tokens


def _logprobs_of(
    request: Request, slot: int, result: StepResult, num_drawn: int
) -> Sequence[TokenLogprobs | None]:
    """Of each token that a step drew for a request; None where it asks for none."""
    count, found = request.sampling.logprobs, result.logprobs
    if count is None or found is None:
        return [None] * num_drawn
    return [
        TokenLogprobs(
            float(found.drawn[slot, place]),
            tuple(
                zip(
                    found.token_ids[slot, place, :count].tolist(),
                    found.top[slot, place, :count].tolist(),
                    strict=True,
                )
            ),
        )
        for place in range(num_drawn)
    ]
