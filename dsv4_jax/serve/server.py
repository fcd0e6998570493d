"""Server: listens, and ends in an orderly way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Self

import uvicorn

from dsv4_jax import checks
from dsv4_jax.serve.app import Endpoints, build_app
from dsv4_jax.serve.connection import connection_class
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine
from dsv4_jax.serving.asynchronous.feed import EngineClosedError

_MARGIN_S = 5
"""Seconds after the drain in which errors are sent to those who still wait."""

_SWITCH_S = 0.001
"""Seconds after which a thread that computes gives way: a fifth of what Python lets it have.

The event loop has to get Python's lock several times to answer anything, and before each time as
many threads as want it may have their turn.
"""

_TELLING_S = 1
"""Seconds for those errors where a second signal says that nobody waits."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, which nobody can connect to before the server runs.

    Raises:
      OSError: the host is unknown or not this machine's, or the port is taken or not for everyone;
        the message names both.
    """
    bound = None
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # a label that is too long is no Unicode for Python
        if bound is not None:
            bound.close()
        raise _name_address(error, host, port) from None
    return bound


def _name_address(error: OSError | UnicodeError, host: str, port: int) -> OSError:
    """An error that says where the server cannot listen, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        way_out = "another program has this port: choose another --port, or 0 for one that is free"
    elif number in (errno.EACCES, errno.EPERM):
        way_out = "low ports are for privileged users: choose another --port, such as 8000"
    else:
        way_out = (
            "--host must be an address of this machine or a name of one, such as 127.0.0.1, or "
            "0.0.0.0 for every interface"
        )
    why = error.strerror if isinstance(error, OSError) else str(error)
    message = f"cannot listen at --host {host!r}, --port {port}: {why}; {way_out}"
    is_named = number is not None and not isinstance(error, socket.gaierror)
    return OSError(number, message) if is_named else OSError(message)


class Server:
    """Serves one asynchronous engine, which it closes at its end.

    `run` serves until SIGTERM or SIGINT. `with server:` does so in a thread of its own.

    Attributes:
      endpoints: what answers.
      address: host and port.
      loop: the event loop that serves; None until it does.
    """

    def __init__(
        self, engine: AsyncEngine, settings: ServeSettings, bound: socket.socket | None = None
    ) -> None:
        """A server that does not serve yet.

        Args:
          engine: what serves the requests.
          settings: what the server allows.
          bound: where it listens, from `bind`; None is a free port of 127.0.0.1.

        Raises:
          ValueError: an argument is of another type.
          EngineClosedError: the engine was shut down.
          RuntimeError: another server answers with the engine.
        """
        self._engine = checks.instance("engine", engine, AsyncEngine)
        self._settings = checks.instance("settings", settings, ServeSettings)
        if bound is not None:
            checks.instance("bound", bound, socket.socket)
        engine.serve_with()
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
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serves until a signal says otherwise; the first one drains, a second one cuts short.

        Raises:
          OSError: another program has listened at the address since `bind`.
          EngineClosedError: it has served, or its engine was shut down.
        """
        self._check_open()
        self.endpoints.prepare()
        self._run(None)

    def drain(self) -> None:
        """Takes no more, lets what runs end for a time, then ends; from any thread."""
        self._uvicorn.should_exit = True  # there may be no event loop yet
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self.loop.call_soon_threadsafe(self._drain)

    def __enter__(self) -> Self:
        """Serves in a thread, from the time when this returns.

        Raises:
          OSError: another program has listened at the address since `bind`.
          EngineClosedError: it has served, or its engine was shut down.
          Exception: what else kept the thread from serving; the engine is closed.
        """
        self._check_open()
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()

        def serve() -> None:
            try:
                self._run(ready)
            except BaseException as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        self._thread = threading.Thread(target=serve, name="dsv4-jax-server")
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Drains and ends."""
        assert self._thread is not None
        self.drain()
        self._thread.join()

    def _check_open(self) -> None:
        if not self._engine.is_serving:
            raise EngineClosedError(
                "a server serves once, and its engine was closed; make a new one"
            )

    def _run(self, ready: concurrent.futures.Future[None] | None) -> None:
        try:
            config = self._uvicorn.config
            try:
                self._socket.listen(config.backlog)
            except OSError as error:
                raise _name_address(error, *self.address) from None
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.get_loop()
                runner.run(self._serve(ready))
        finally:
            self._socket.close()
            self._engine.close()
            self.endpoints.close()

    async def _serve(self, ready: concurrent.futures.Future[None] | None) -> None:
        self.loop = asyncio.get_running_loop()
        if ready is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                self.loop.add_signal_handler(number, self._drain)
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, _SWITCH_S))
        gc.freeze()  # to look through all that jax keeps would hold the event loop for 100 ms
        try:
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(0.005)
            if ready is not None and not serving.done():
                ready.set_result(None)
            await serving
            if ready is not None and not ready.done():
                ready.set_result(None)  # it was drained before it could begin
        finally:
            gc.unfreeze()
            sys.setswitchinterval(interval)
            self.endpoints.stop()
            await self._engine.aclose()
            if told := set(self._uvicorn.server_state.tasks):  # what was cut short
                await asyncio.wait(told, timeout=_TELLING_S)

    def _drain(self) -> None:
        """In the event loop: stops accepting; what still runs when the time is over is ended."""
        if self.endpoints.is_draining:
            self._uvicorn.force_exit = True
            return
        self.endpoints.is_draining = True
        self._uvicorn.should_exit = True
        assert self.loop is not None
        self.loop.call_later(self._settings.drain_timeout_s, self.endpoints.stop)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield
