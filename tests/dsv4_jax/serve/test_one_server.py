"""A server owns its asynchronous engine, which holds the engine until the server has ended."""

import httpx
import pytest

from dsv4_jax.serve import Server, ServeSettings
from dsv4_jax.serving import AsyncEngine, EngineClosedError
from helpers.serve import MODEL, running, warm_engine

SETTINGS = ServeSettings(model_name=MODEL)
ASKED = {"max_new_tokens": 5, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def engine():
    return warm_engine()


def test_an_engine_is_free_again_when_its_server_has_ended(engine):
    expected = engine.generate(["hello"], **ASKED)
    with running(engine) as server:
        for call in (lambda: engine.generate(["hello"], **ASKED), lambda: AsyncEngine(engine)):
            with pytest.raises(RuntimeError, match="an AsyncEngine holds the engine"):
                call()
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert engine.generate(["hello"], **ASKED) == expected


def test_one_server_answers_with_an_async_engine_and_once(engine):
    shared = AsyncEngine(engine)
    with Server(shared, SETTINGS) as server:
        with pytest.raises(RuntimeError, match="must be of no other Server"):
            Server(shared, SETTINGS)
        assert httpx.get(f"{server.url}/health").status_code == 200
    for again in (server.run, server.__enter__, lambda: Server(shared, SETTINGS)):
        with pytest.raises(EngineClosedError):
            again()
    with running(engine) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("wrong", [None, "engine", 3])
def test_a_server_of_something_else_is_refused(engine, wrong):
    with pytest.raises(ValueError, match="engine must be a AsyncEngine, got"):
        Server(engine if wrong is None else wrong, SETTINGS)
    with AsyncEngine(engine) as shared:
        with pytest.raises(ValueError, match="settings must be a ServeSettings, got"):
            Server(shared, wrong)
        with pytest.raises(ValueError, match="bound must be a socket, got 8000"):
            Server(shared, SETTINGS, 8000)
        with Server(shared, SETTINGS) as server:  # those took nothing
            assert httpx.get(f"{server.url}/health").status_code == 200
