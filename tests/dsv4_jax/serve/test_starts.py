"""Servers that cannot start, or whose thread ends by itself."""

import threading

import httpx
import pytest

from dsv4_jax.serve import Server, ServeSettings
from dsv4_jax.serve.server import bind
from dsv4_jax.serving import AsyncEngine
from helpers.serve import BYTES_ALONE, running


@BYTES_ALONE
def test_what_keeps_the_thread_from_serving_is_raised_where_it_was_started(engine, monkeypatch):
    """Also where there is no event loop yet."""
    before = threading.active_count()

    def no_loop():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("uvicorn.Config.get_loop_factory", lambda _: no_loop)
    with pytest.raises(OSError, match="Too many open files"), running(engine):
        pytest.fail("it does not serve")
    monkeypatch.undo()

    async def no_start(*_, **__):
        raise RuntimeError("no start")

    monkeypatch.setattr("uvicorn.Server.startup", no_start)
    with pytest.raises(RuntimeError, match="no start"), running(engine):
        pytest.fail("it does not serve")
    monkeypatch.undo()
    assert threading.active_count() == before
    with running(engine) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200


@BYTES_ALONE
def test_a_server_whose_thread_has_ended_can_be_left(engine):
    with running(engine) as server:
        server.drain()
        server._thread.join(30)
        server.drain()


@BYTES_ALONE
def test_a_port_that_was_taken_since_it_was_bound_is_named(engine):
    """Two servers that load at once may bind one port; the first one to listen has it."""
    with bind("127.0.0.1", 0) as first:
        host, port = first.getsockname()
        late = [bind(host, port) for _ in range(2)]
        first.listen()
        with pytest.raises(OSError, match=f"port {port}: Address already in use"):
            bind(host, port)
        wanted = rf"--host '127.0.0.1', --port {port}: Address already in use"
        with pytest.raises(OSError, match=wanted), running(engine, bound=late[0]):
            pytest.fail("it does not serve")
        shared = AsyncEngine(engine)
        server = Server(shared, ServeSettings(model_name="small"), late[1])
        with pytest.raises(OSError, match=wanted):
            server.run()
        assert not shared.is_serving
