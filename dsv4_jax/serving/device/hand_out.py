"""What a step drew, given to the requests: tokens, texts, ends, and how long they took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4_jax.serving.device.step_result import StepResult
from dsv4_jax.serving.metrics.histogram import add_values
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.requests.calls import UndoLog
from dsv4_jax.serving.requests.request import Request, Token, TokenLogprobs
from dsv4_jax.serving.requests.step_tokens import StepTokens
from dsv4_jax.serving.requests.token_texts import TokenTexts
from dsv4_jax.serving.schedule.running import Running

_REASONS = (None, "stop", "length", "error")
_STOP, _LENGTH = 1, 2


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
            requests = [requests[index] for index in places.tolist()]
        self.requests = requests
        self.ended: list[Request] = []
        self._running, self._places, self._slots = running, places, slots
        self._result, self._now = result, now
        self._metrics, self._undo = metrics, undo

    def note_unreturned(self) -> None:
        """Before `run`: what requests get now, no caller of a step gets with it."""
        for request in self.requests:
            if request.num_returned is None:
                self._undo.save(request)
                request.num_returned = request.num_drawn

    def run(self, texts: TokenTexts | None) -> StepTokens:
        """Adds drawn tokens to requests, and sets why those that have ended did.

        All requests at once, but for those with stop texts or log-probabilities, or whose tokens
        are no whole characters, which are served one by one.

        Args:
          texts: of tokens, if there is a tokenizer.

        Returns:
          The tokens, those of a request in order.
        """
        slots, known = self._slots, self._running.known
        drawn = self._result.token_ids[slots]
        num_drawn = (drawn >= 0).sum(axis=1)
        count, reasons = self._find_ends(drawn, num_drawn)
        column, is_alone = self._read_texts(drawn, count, texts)
        logprobs: dict[tuple[int, int], TokenLogprobs] = {}
        if is_alone.any():
            self._undo.save_array(known.num_known)
            self._undo.save_array(known.holds_text)
        for row in np.flatnonzero(is_alone).tolist():
            request = self.requests[row]
            self._undo.save(request)
            tokens = self._add_alone(row, drawn[row, : num_drawn[row]].tolist(), texts)
            count[row], reasons[row] = len(tokens), _REASONS.index(request.finish_reason)
            known.holds_text[slots[row]] = request.holds_text
            for order, token in enumerate(tokens):
                if column is not None:
                    column[row, order] = token.text
                if token.logprobs is not None:
                    logprobs[row, order] = token.logprobs
        self._time(count, num_drawn)
        rest = ~is_alone if is_alone.any() else slice(None)
        known.add(slots[rest], drawn[rest], count[rest], self._now, self._undo)
        known.last_token_s[slots] = self._now
        self._metrics.generated_tokens += int(count.sum())
        self._end(reasons)
        return self._tokens(drawn, count, reasons, column, logprobs)

    def _find_ends(self, drawn: np.ndarray, num_drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens of each request count, and why it ends with them, by ids alone.

        Reasons are places in `_REASONS`.
        """
        running, places = self._running, self._places
        stops = running.stops[places]
        left = running.totals[places] - running.known.num_known[self._slots]
        count, reasons = np.minimum(num_drawn, left), _LENGTH * (num_drawn >= left)
        if stops.shape[1]:
            stopping = np.any(drawn[:, :, None] == stops[:, None], axis=2) & (drawn >= 0)
            first = stopping.argmax(axis=1) + 1
            stopped = stopping.any(axis=1) & (first <= left)
            count[stopped], reasons[stopped] = first[stopped], _STOP
        return count, reasons

    def _read_texts(
        self, drawn: np.ndarray, count: np.ndarray, texts: TokenTexts | None
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Texts of whole tokens, object[n, m], and bool[n], which requests are served alone."""
        running, places = self._running, self._places
        is_alone = running.wants_logprobs[places]
        if texts is None:
            return None, is_alone
        column, is_whole = texts.of(np.maximum(drawn, 0))
        is_alone |= running.has_stop_texts[places] | running.known.holds_text[self._slots]
        is_alone |= np.any(~is_whole & (np.arange(drawn.shape[1]) < count[:, None]), axis=1)
        return column, is_alone

    def _end(self, reasons: np.ndarray) -> None:
        """Requests that have a reason end for it."""
        for row in np.flatnonzero(reasons).tolist():
            request = self.requests[row]
            self._undo.save(request)
            request.finish_reason = _REASONS[reasons[row]]
            self.ended.append(request)

    def _tokens(
        self,
        drawn: np.ndarray,
        count: np.ndarray,
        reasons: np.ndarray,
        texts: np.ndarray | None,
        logprobs: dict[tuple[int, int], TokenLogprobs],
    ) -> StepTokens:
        """What the step gives; a request that ended for an error has no last token."""
        ends = np.cumsum(count)
        lasts = np.flatnonzero((reasons == _STOP) | (reasons == _LENGTH)).tolist()
        width = drawn.shape[1]
        rows, order = np.flatnonzero(count), 0
        if width > 1:
            rows, order = np.nonzero(np.arange(width) < count[:, None])
        return StepTokens(
            self._running.ids[self._places[rows]],
            drawn[rows, order],
            {int(ends[row]) - 1: _REASONS[reasons[row]] for row in lasts},
            None if texts is None else texts[rows, order],
            {int(ends[row] - count[row]) + number: one for (row, number), one in logprobs.items()},
        )

    def _time(self, count: np.ndarray, num_drawn: np.ndarray) -> None:
        """Counts the time to first tokens, and between tokens; those of one step share theirs."""
        last_s, now = self._running.known.last_token_s[self._slots], self._now
        rows = np.arange(len(count))
        if not count.all():
            rows = np.flatnonzero(count)
            count, num_drawn, last_s = count[rows], num_drawn[rows], last_s[rows]
        is_first = np.isnan(last_s)
        if is_first.any():
            submitted = [self.requests[row].submitted_s for row in rows[is_first].tolist()]
            add_values(self._metrics.first_token_s, now - np.array(submitted), count[is_first])
            last_s, count = last_s[~is_first], count[~is_first]
            num_drawn = num_drawn[~is_first]
        add_values(self._metrics.token_s, (now - last_s) / num_drawn, count)

    def _add_alone(self, row: int, drawn: list[int], texts: TokenTexts | None) -> list[Token]:
        """Adds a request's drawn tokens; what that raises ends this request alone."""
        request, tokens = self.requests[row], []
        logprobs = logprobs_of(request, int(self._slots[row]), self._result, len(drawn))
        tokenizer = None if texts is None else texts.tokenizer
        for token_id, its_logprobs in zip(drawn, logprobs, strict=True):
            try:
                request.add(token_id, tokenizer, its_logprobs)
            except Exception as error:
                request.finish_reason, request.error = "error", error
                return tokens
            tokens.append(request.token(request.num_drawn - 1))
            if request.finish_reason is not None:
                break
        return tokens


def logprobs_of(
    request: Request, slot: int, result: StepResult, num_drawn: int
) -> Sequence[TokenLogprobs | None]:
    """Of each token that a step drew for a request; None where it asks for none."""
    count, logprobs = request.sampling.logprobs, result.logprobs
    if count is None or logprobs is None:
        return [None] * num_drawn
    return [
        TokenLogprobs(
            float(logprobs.drawn[slot, number]),
            tuple(
                zip(
                    logprobs.token_ids[slot, number, :count].tolist(),
                    logprobs.top[slot, number, :count].tolist(),
                    strict=True,
                )
            ),
        )
        for number in range(num_drawn)
    ]
