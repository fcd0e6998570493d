"""Work off the event loop, for clients that may leave meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request

from dsv4_jax.serve.errors import ApiError


class Threads:
    """So many calls at a time, the first that came first. Calls of clients that left are not begun.

    One event loop uses it.
    """

    def __init__(self, name: str, count: int, *, max_waiting: int | None = None) -> None:
        """Starts nothing yet.

        Args:
          name: what they work on.
          count: calls at a time.
          max_waiting: calls beyond them; None is any number.
        """
        self._name = name
        self._most = None if max_waiting is None else count + max_waiting
        self._num_calls = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(count, f"dsv4-jax {name}")

    async def run[R](self, call: Callable[..., R], *arguments: Any) -> R:
        """What a call gives.

        Raises:
          ApiError: too many wait.
        """
        if self._most is not None and self._num_calls >= self._most:
            raise ApiError(
                429,
                f"{self._num_calls} {self._name} are worked on or wait, which are as many as may "
                "be; try again later",
                code="queue_full",
            )
        self._num_calls += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, call, *arguments)
        finally:
            self._num_calls -= 1

    def begin(self, call: Callable[[], object]) -> None:
        """Begins a call that nobody waits for."""
        self._pool.submit(call)

    def close(self) -> None:
        """Ends the threads, after the calls that they have begun."""
        self._pool.shutdown(cancel_futures=True)


async def while_there[R](request: Request, work: Coroutine[Any, Any, R]) -> R:
    """What some work gives, which is given up when the client leaves.

    Args:
      request: whose body has been read.
      work: what is awaited.

    Raises:
      ClientDisconnect: the client left before.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await leaving
