"""Server: listens, and ends in an orderly way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Self

import uvicorn

from dsv4_jax.serve.app import Endpoints, build_app
from dsv4_jax.serve.connection import connection_class
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving.async_engine import AsyncEngine

_MARGIN_S = 5
"""Seconds after the drain in which errors are sent to those who still wait."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, which nobody can connect to before the server runs.

    Raises:
      OSError: the address is taken, or not this machine's.
    """
    family, kind, number, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, number)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class Server:
    """Serves one asynchronous engine, which it closes at its end.

    `run` serves until SIGTERM or SIGINT. `with server:` does so in a thread of its own.

    Attributes:
      endpoints: what answers.
      address: host and port.
    """

    def __init__(
        self, engine: AsyncEngine, settings: ServeSettings, bound: socket.socket | None = None
    ) -> None:
        """A server that does not serve yet.

        Args:
          engine: what serves the requests.
          settings: what the server allows.
          bound: where it listens, from `bind`; None is a free port of 127.0.0.1.
        """
        self._engine = engine
        self._settings = settings
        self._socket = bound or bind("127.0.0.1", 0)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        app = build_app(engine, settings)
        self.endpoints: Endpoints = app.state.endpoints
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=connection_class(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=settings.max_connections,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=int(settings.drain_timeout_s) + _MARGIN_S,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serves until a signal says otherwise; the first one drains, a second one cuts short."""
        asyncio.run(self._serve(), loop_factory=self._uvicorn.config.get_loop_factory())

    def drain(self) -> None:
        """Takes no more, lets what runs end for a time, then ends; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    def __enter__(self) -> Self:
        """Serves in a thread."""
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(
                self._serve(ready), loop_factory=self._uvicorn.config.get_loop_factory()
            ),
            name="dsv4-jax-server",
        )
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """Drains and ends."""
        assert self._thread is not None
        self.drain()
        self._thread.join()

    async def _serve(self, ready: threading.Event | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if ready is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._drain)
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        try:
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(0.005)
            if ready is not None:
                ready.set()
            await serving
        finally:
            if ready is not None:
                ready.set()
            await self._engine.aclose()
            self.endpoints.close()

    def _drain(self) -> None:
        """In the event loop: stops accepting; what still runs when the time is over is ended."""
        if self.endpoints.is_draining:
            self._uvicorn.force_exit = True
            return
        self.endpoints.is_draining = True
        self._uvicorn.should_exit = True
        assert self._loop is not None
        self._loop.call_later(self._settings.drain_timeout_s, self._engine.stop)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield
