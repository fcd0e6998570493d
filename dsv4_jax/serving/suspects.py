"""Suspects: which request makes steps fail, found by serving the running ones one by one."""

from __future__ import annotations

from dsv4_jax.serving.request import Request
from dsv4_jax.serving.request_queue import RequestQueue


class Suspects:
    """Requests that were served when a second step in a row raised.

    A first error is the caller's to see: nothing says whom it concerns, and the next step may go
    well. After a second one every running request is served once alone, the oldest first. Who
    fails alone ends with the error; the others have been cleared and go on together. So no error
    comes back for ever.
    """

    def __init__(self) -> None:
        """Starts with nobody."""
        self._requests: list[Request] = []
        self._has_failed = False

    def __bool__(self) -> bool:
        """Whether anybody is to be served alone."""
        return bool(self._requests)

    def next(self) -> Request | None:
        """Whom the next step serves alone; None if it serves all."""
        while self._requests and self._requests[0].finish_reason is not None:
            del self._requests[0]
        return self._requests[0] if self._requests else None

    def clear(self, served: Request | None) -> None:
        """A step went well."""
        self._has_failed = False
        self._requests = [request for request in self._requests if request is not served]

    def fail(self, error: Exception, served: Request | None, queue: RequestQueue) -> Request | None:
        """A step raised.

        Args:
          error: what it raised.
          served: whom it served alone; None if it served all.
          queue: who runs and waits, after the step.

        Returns:
          The request that the error has ended, which has still to leave its slot or the queue.
        """
        if served is not None:
            if served.finish_reason is not None:
                return None
            served.fail(error)
            return served
        if self._has_failed:
            # Where no request runs, the oldest that waits is what the step could not admit.
            self._requests = queue.by_age() or queue.waiting[:1]
        self._has_failed = True
        return None
