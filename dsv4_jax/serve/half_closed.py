"""HalfClosed: the way to a client that sends no more, and may or may not read."""

from __future__ import annotations

import asyncio

_BEGINNING = b"HTTP/1.1 "
"""Of every answer, whatever its status."""

_FIRST_WAIT_S = 0.1


class HalfClosed:
    """A transport that finds out whether its client is still there, before there is an answer.

    A client that closes its writing side after a request and one that goes look alike: the end of
    what they send. The difference is seen when something is sent to them. The machine of a client
    that has gone refuses it, and what is sent after that fails, so that the connection is lost. So
    the first bytes of the answer, which are the same for all, go out one by one, each after twice
    the time of the one before, and the answer goes on from there.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Sends the first byte; no part of an answer must have been sent."""
        self._transport = transport
        self._loop = loop
        self._num_sent = 0
        self._wait_s = _FIRST_WAIT_S
        self._timer: asyncio.TimerHandle | None = None
        self._send_one()

    def write(self, data: bytes) -> None:
        """Sends what is left of a part."""
        self._stop()
        rest, self._num_sent = data[self._num_sent :], 0
        self._transport.write(rest)

    def close(self) -> None:
        """Closes the connection."""
        self._stop()
        self._transport.close()

    def is_closing(self) -> bool:
        """The connection is closed or is being closed."""
        return self._transport.is_closing()

    def _send_one(self) -> None:
        self._timer = None
        if self.is_closing():
            return
        self._transport.write(_BEGINNING[self._num_sent : self._num_sent + 1])
        self._num_sent += 1
        if self._num_sent < len(_BEGINNING):
            self._timer = self._loop.call_later(self._wait_s, self._send_one)
            self._wait_s *= 2

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
