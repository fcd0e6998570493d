"""Suspects: which request makes steps fail, found by serving them one by one."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4_jax.serving.requests.request import Request


class Suspects:
    """Requests that were there when a step raised, until they have come past the place.

    A first error is the caller's to see: nothing says whom it concerns, and the next steps may go
    well. If another step raises before all have come past the place where they were, they are
    served alone, one after the other, the oldest first, and each until it has come past it, however
    many steps its prompt takes. Who fails alone ends with the error; the others have been cleared
    and go on together. So no error comes back for ever.
    """

    def __init__(self, reach_tokens: int) -> None:
        """Starts with nobody.

        Args:
          reach_tokens: the most that a request draws in a step that raises and in the one in flight
            before it, which is computed again.
        """
        self._reach_tokens = reach_tokens
        self._goals: dict[Request, int] = {}  # tokens that each knows when it has come past
        self._requests: list[Request] = []  # who is to be served alone

    def next(self) -> Request | None:
        """Whom the next step serves alone; None if it serves all."""
        self._requests = [request for request in self._requests if not self._is_past(request)]
        return self._requests[0] if self._requests else None

    def clear(self, alone: Request | None) -> None:
        """A step went well, for all or for one alone; whom one for all left out is no suspect."""
        if self._goals:
            self._goals = {
                suspect: goal
                for suspect, goal in self._goals.items()
                if not self._is_past(suspect) and (alone is not None or suspect.slot >= 0)
            }

    def fail(self, requests: Iterable[Request]) -> bool:
        """A step for all raised.

        Args:
          requests: those there are, finished ones too.

        Returns:
          Whether an earlier error is not behind, and the next steps serve one alone.
        """
        is_first = not self._goals
        unfinished = [one for one in requests if one.finish_reason is None]
        self._goals = {one: one.num_known + self._reach_tokens for one in unfinished}
        self._requests = []
        if not is_first:
            self._requests = sorted(unfinished, key=lambda request: request.request_id)
        return bool(self._requests)

    def _is_past(self, request: Request) -> bool:
        goal = self._goals.get(request, 0)
        return request.finish_reason is not None or request.num_known >= goal
