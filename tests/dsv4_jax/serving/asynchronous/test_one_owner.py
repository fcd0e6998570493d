"""An engine has one caller: while an AsyncEngine holds it, all others are refused, untouched."""

import asyncio
import threading

import pytest

from dsv4_jax import serving
from dsv4_jax.serving.engine_state import read_state
from helpers.serving import make_engine

LONG = {"max_new_tokens": 100, "stop_token_ids": ()}
ASKED = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3, "stop_token_ids": ()}
CALLS = {
    "submit": lambda engine: engine.submit([1, 2], **ASKED),
    "submit_many": lambda engine: engine.submit_many([1, 2], 2, **ASKED),
    "fork": lambda engine: engine.fork(0, seed=1),
    "cancel": lambda engine: engine.cancel(0),
    "preempt": lambda engine: engine.preempt(0),
    "step": lambda engine: engine.step(),
    "stream": lambda engine: engine.stream(0),
    "completion": lambda engine: engine.completion(0),
    "generate": lambda engine: engine.generate([[1, 2]], **ASKED),
    "verify": lambda engine: engine.verify(),
    "warmup": lambda engine: engine.warmup(),
    "close": lambda engine: engine.close(),
    "cache": lambda engine: engine.cache,
    "state": read_state,
    "AsyncEngine": serving.AsyncEngine,
}


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(autouse=True)
def it_is_free_again(engine):
    yield
    assert "dsv4-jax-engine" not in {thread.name for thread in threading.enumerate()}
    assert engine.num_unfinished == 0
    assert not engine.verify().problems


SAYS = {name: f"{name} was called" for name in CALLS} | {
    "cache": "cache was read",
    "state": "its state was read",
    "AsyncEngine": "another AsyncEngine was made",
}
"""What an error says that the caller did, who knows no inner method."""


def refused(call, engine, says=""):
    message = f"an AsyncEngine holds the engine.*{says} beside it; use .* or close it first"
    with pytest.raises(RuntimeError, match=message):
        call(engine)
    return True


def test_calls_beside_an_async_engine_are_refused_and_change_nothing(engine):
    (expected,) = engine.generate([[7, 8, 9]], **LONG)

    async def run():
        async with serving.AsyncEngine(engine) as shared:
            stream = shared.submit([7, 8, 9], **LONG)
            drawn = [await anext(stream)]
            submitted = engine.metrics.submitted
            for name, call in CALLS.items():  # while steps run
                assert refused(call, engine, SAYS[name]), name
            assert engine.metrics.submitted == submitted
            drawn += [token async for token in stream]
            for name, call in CALLS.items():  # while it waits for requests
                assert refused(call, engine, SAYS[name]), name
            assert shared.is_serving
            return [token.token_id for token in drawn]

    assert asyncio.run(run()) == expected.token_ids
    assert engine.generate([[7, 8, 9]], **LONG) == [expected]


def test_another_async_engine_takes_an_engine_that_the_first_has_left(engine):
    (expected,) = engine.generate([[1, 2]], **ASKED)

    async def complete(shared):
        return (await shared.submit([1, 2], **ASKED).completion()).token_ids

    for _ in range(2):
        with serving.AsyncEngine(engine) as shared:
            with pytest.raises(RuntimeError, match="an AsyncEngine holds the engine"):
                serving.AsyncEngine(engine)
            assert asyncio.run(complete(shared)) == expected.token_ids
        assert engine.generate([[1, 2]], **ASKED) == [expected]


def test_an_engine_with_requests_of_its_own_is_not_taken(engine):
    """Between two steps of a stream or of `generate` no call is in progress."""
    stream = engine.stream(engine.submit([1, 2], **ASKED))
    next(stream)
    with pytest.raises(RuntimeError, match="without unfinished requests, and 1 of this one's run"):
        serving.AsyncEngine(engine)
    assert len(list(stream)) == ASKED["max_new_tokens"] - 1
    with serving.AsyncEngine(engine) as shared:
        refused(lambda _: next(engine.stream(0)), engine, "stream was called")
        assert shared.is_serving


def test_an_engine_in_the_middle_of_a_call_is_not_taken(engine):
    says = "one call at a time, and another AsyncEngine was made while"
    with engine.call_lock.lock, pytest.raises(RuntimeError, match=says):
        serving.AsyncEngine(engine)


def test_a_thread_that_does_not_start_holds_nothing(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            serving.AsyncEngine(engine)
    assert len(engine.generate([[1]], **ASKED)[0].token_ids) == ASKED["max_new_tokens"]


def test_an_interrupt_while_the_thread_starts_leaves_the_engine_free(engine, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            serving.AsyncEngine(engine)
    for thread in threading.enumerate():
        if thread.name == "dsv4-jax-engine":
            thread.join()
    assert len(engine.generate([[1]], **ASKED)[0].token_ids) == ASKED["max_new_tokens"]


def test_an_engine_that_failed_for_good_is_given_back(engine, monkeypatch):
    async def run():
        shared = serving.AsyncEngine(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", lambda: 1 / 0)
            with pytest.raises(serving.EngineClosedError):
                await anext(shared.submit([1], **LONG))
            await shared.aclose()

    asyncio.run(run())
    assert len(engine.generate([[1]], **ASKED)[0].token_ids) == ASKED["max_new_tokens"]
