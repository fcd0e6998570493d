"""Connection: one client's, with the patience that a server has for it."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dsv4_jax.serve.half_closed import HalfClosed
from dsv4_jax.serve.parser import RequestParser
from dsv4_jax.serve.settings import ServeSettings

MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers."""

_COMMENT_CHUNK = b"3\r\n:\n\n\r\n"
"""Of a body in chunks: a line that every reader of server-sent events skips."""
_SECOND_SIGN_S = 0.1


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol, cut off where the other end takes too much or too long.

    The head of a request has a size and a time. So has what a client sends while no request of its
    is being answered, such as the rest of a body that was refused. A client that does not read its
    answer is cut off too. `connection_class` sets the limits.

    An offer of another protocol is passed over. A client that sends no more gets the answers to the
    requests that it has sent whole.
    """

    settings: ServeSettings
    _in_head = True
    _head_bytes = 0
    _has_offer = False
    _is_half_closed = False
    _patience: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """Of one client; arguments are those of uvicorn's protocol."""
        super().__init__(*args, **options)
        self.parser: httptools.HttpRequestParser = RequestParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """A part of a request has come."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("Headers are too large.")
        elif self._in_head or self.cycle is None or self.cycle.response_complete:
            self._wait()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request's head is there."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._has_offer = True
            return
        self._in_head = False
        self._patience = _stop(self._patience)
        self._obey_target()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is there."""
        if not self._has_offer:
            super().on_message_complete()

    def take_offer(self) -> bytes | None:
        """The head that offered another protocol without the offer; None if there was none."""
        if not self._has_offer:
            return None
        self._has_offer = False
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether there are answers that it may wait for."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        if self.cycle.more_body:
            if not self.pipeline:
                return False
            self.pipeline.popleft()  # it was cut off, and those before it were not
        elif not self.pipeline and not self.cycle.response_started:
            self.cycle.transport = HalfClosed(self.transport, self.loop)  # type: ignore[assignment]
        elif not self.pipeline and self.cycle.chunked_encoding:
            self._show_life()  # if nobody is there, what is sent after the first sign fails
            self.loop.call_later(_SECOND_SIGN_S, self._show_life)
        self._is_half_closed = True
        return True

    def _show_life(self) -> None:
        """Sends a comment between the events of a stream."""
        if not self.transport.is_closing() and not self.cycle.response_complete:
            self.transport.write(_COMMENT_CHUNK)

    def on_response_complete(self) -> None:
        """An answer is sent."""
        if self._is_half_closed and not self.pipeline:
            self.transport.close()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.settings.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stall = _stop(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._patience, self._stall = _stop(self._patience), _stop(self._stall)
        super().connection_lost(exc)

    def _obey_target(self) -> None:
        """Lets a target with a host, as proxies get it, say the host (RFC 9112, 3.2.2)."""
        if self.url.startswith(b"/"):
            return
        target = httptools.parse_url(self.url)
        if target.host is None:
            return
        host = b"[%b]" % target.host if b":" in target.host else target.host
        if target.port is not None:
            host += b":%d" % target.port
        self.headers[:] = [header for header in self.headers if header[0] != b"host"]
        self.headers.append((b"host", host))
        query = b"" if target.query is None else b"?" + target.query
        self.url = (target.path or b"/") + query

    def _wait(self) -> None:
        if self._patience is None and not self.transport.is_closing():
            self._patience = self.loop.call_later(
                self.settings.header_timeout_s, self.transport.abort
            )


def connection_class(settings: ServeSettings) -> type[Connection]:
    """The class for a server of these settings."""
    return type("BoundedConnection", (Connection,), {"settings": settings})


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
