"""Suspects: which request makes steps fail, found by serving them one by one."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4_jax.serving.request import Request


class Suspects:
    """Requests that were there when a second step in a row raised.

    A first error is the caller's to see: nothing says whom it concerns, and the next step may go
    well. After a second one every request is served once alone, the oldest first. Who fails alone
    ends with the error; the others have been cleared and go on together. So no error comes back
    for ever.
    """

    def __init__(self) -> None:
        """Starts with nobody."""
        self._requests: list[Request] = []
        self._has_failed = False

    def next(self) -> Request | None:
        """Whom the next step serves alone; None if it serves all."""
        self._requests = [one for one in self._requests if one.finish_reason is None]
        return self._requests[0] if self._requests else None

    def clear(self, served: Request | None) -> None:
        """A step went well, one for all or for one alone."""
        self._has_failed = False
        self._requests = [one for one in self._requests if one is not served]

    def fail(self, requests: Iterable[Request]) -> bool:
        """A step for all raised.

        Args:
          requests: those there are, finished ones too.

        Returns:
          Whether the last one raised too, and the next steps serve one alone.
        """
        if self._has_failed:
            self._requests = sorted(
                (one for one in requests if one.finish_reason is None),
                key=lambda request: request.request_id,
            )
        self._has_failed = True
        return bool(self._requests)
