"""AsyncEngine: tokens for coroutines, requests from any thread, and ends that leave nothing.

All runs are steps of one program, so that equal means equal to the bit.
"""

import asyncio
import concurrent.futures
import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax import serving
from dsv4_jax.serving.asynchronous import stepper
from dsv4_jax.serving.requests.prompts import Limits
from helpers.serving import fail_with_prompts_of, make_engine, prompt, same_tokens, until

LONG = {"max_new_tokens": 400, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    yield
    assert "dsv4-jax-engine" not in {thread.name for thread in threading.enumerate()}
    assert not engine.requests
    assert (engine.metrics.running, engine.metrics.waiting, engine.metrics.used_blocks) == (0, 0, 0)


def cases(count, seed=0):
    rng = np.random.default_rng(seed)
    texts = [prompt(rng, int(rng.integers(3, 60))) for _ in range(count)]
    wanted = [
        {"max_new_tokens": int(rng.integers(1, 12)), "temperature": 0.8 * (i % 2), "seed": i}
        for i in range(count)
    ]
    return list(zip(texts, wanted, strict=True))


async def read(stream):
    return [token.token_id async for token in stream]


def test_coroutines_get_what_generate_gives(engine):
    asked = cases(6)
    expected = [engine.generate([text], **wanted)[0] for text, wanted in asked]

    async def run():
        async with serving.AsyncEngine(engine) as shared:
            streams = [shared.submit(text, **wanted) for text, wanted in asked]
            drawn = await asyncio.gather(*map(read, streams))
            done = await asyncio.gather(*(stream.completion() for stream in streams))
            whole = await shared.submit(asked[0][0], **asked[0][1]).completion()
        return drawn, done, whole

    drawn, done, whole = asyncio.run(run())
    assert drawn == [one.token_ids for one in expected]
    for actual, one in zip(done, expected, strict=True):
        same_tokens(actual, one)
    same_tokens(whole, expected[0])


@pytest.mark.slow
def test_samples_of_one_prompt(engine):
    """Sample i is the request with i more in its seed."""
    asked = {"max_new_tokens": 9, "temperature": 0.9}
    text = cases(1, seed=5)[0][0]
    expected = [engine.generate([text], seed=s, **asked)[0].token_ids for s in (7, 8, 9, 10, 11)]

    async def run():
        async with serving.AsyncEngine(engine, max_waiting=5) as shared:
            streams = shared.submit_many(text, 5, seed=7, **asked)
            drawn = {number: [] for number in range(5)}
            async for number, tokens in serving.read_batches(streams):
                drawn[number] += [token.token_id for token in tokens]
            with pytest.raises(serving.QueueFullError):
                shared.submit_many(text, 6, **asked)
            with pytest.raises(ValueError, match="n must be"):
                shared.submit_many(text, 0, **asked)
            return list(drawn.values())

    assert asyncio.run(run()) == expected


def test_a_request_and_its_settings_are_checked_once(engine, monkeypatch):
    """`submit` does it in its caller's thread; the one that steps takes what it made."""
    checked, built = [], []
    check, build = Limits.check_prompt, ds.SamplingParams.__post_init__
    monkeypatch.setattr(
        Limits, "check_prompt", lambda *given, **named: checked.append(1) or check(*given, **named)
    )
    monkeypatch.setattr(
        ds.SamplingParams, "__post_init__", lambda one: built.append(1) or build(one)
    )

    async def run():
        async with serving.AsyncEngine(engine) as shared:
            streams = shared.submit_many([1, 2, 3], 3, max_new_tokens=4, temperature=0.5, seed=1)
            return await asyncio.gather(*map(read, streams))

    assert len(asyncio.run(run())) == 3
    assert (len(checked), len(built)) == (1, 1)


def test_threads_with_loops_of_their_own(engine):
    asked = cases(6, seed=1)
    expected = [engine.generate([text], **wanted)[0].token_ids for text, wanted in asked]
    with (
        serving.AsyncEngine(engine) as shared,
        concurrent.futures.ThreadPoolExecutor(6) as pool,
    ):

        def run(case):
            text, wanted = case
            return asyncio.run(read(shared.submit(text, **wanted)))

        assert list(pool.map(run, asked)) == expected


def test_cancel_fork_and_batches(engine):
    text, wanted = cases(1, seed=2)[0][0], LONG | {"temperature": 0.9, "seed": 3}
    (expected,) = engine.generate([text], **(wanted | {"max_new_tokens": 40}))

    async def run():
        async with serving.AsyncEngine(engine) as shared:
            stream = shared.submit(text, **wanted)
            first = await anext(stream)
            same = stream.fork(seed=3)
            drawn = [first.token_id]
            while len(drawn) < 40:
                drawn += [token.token_id for token in await stream.batch()]
            assert drawn[:40] == expected.token_ids
            stream.cancel()
            done = await stream.completion()
            assert done.finish_reason == "cancelled"
            assert done.token_ids[: len(drawn)] == drawn
            assert await stream.batch() == []
            forked = []
            while len(forked) < 20:
                forked += [token.token_id for token in await same.batch()]
            same.cancel()
            whole = (await same.completion()).token_ids
            assert whole[:40] == expected.token_ids[: len(whole)]
            starts = [i for i in range(1, 40) if whole[i : i + len(forked)] == forked]
            assert starts  # of what came before the fork the stream gave nothing
            with pytest.raises(ValueError, match="unfinished"):
                await anext(stream.fork(seed=1))
            with pytest.raises(ValueError, match="seed must be"):
                stream.fork(seed=0.5)

    asyncio.run(run())


def test_bad_requests_are_refused_at_once(engine):
    with serving.AsyncEngine(engine, max_waiting=1) as shared:
        with pytest.raises(ValueError, match="prompt is empty"):
            shared.submit([])
        with pytest.raises(ValueError, match="temperature must be"):
            shared.submit([1], temperature=-1)
        assert shared.num_unfinished == 0
    for name, value in {"max_waiting": 0, "queue_timeout_s": -1, "max_unread_tokens": 0}.items():
        with pytest.raises(ValueError, match=name):
            serving.AsyncEngine(engine, **{name: value})
    with pytest.raises(ValueError, match="engine must be"):
        serving.AsyncEngine(shared)
    with pytest.raises(serving.EngineClosedError):
        shared.submit([1])
    assert not shared.is_serving


def test_a_full_queue_and_a_deadline(engine):
    async def run():
        async with serving.AsyncEngine(engine, max_waiting=4, queue_timeout_s=0.2) as shared:
            running = [shared.submit([1, 2, 3], **LONG) for _ in range(4)]
            for stream in running:
                await anext(stream)
            assert shared.num_waiting == 0
            late = [shared.submit([i + 1], **LONG) for i in range(4)]
            with pytest.raises(serving.QueueFullError, match="max_waiting is 4"):
                shared.submit([1])
            with pytest.raises(serving.QueueFullError, match="max_waiting is 4"):
                running[0].fork(seed=1)
            for stream in late:
                with pytest.raises(serving.QueueFullError, match="no slot was free"):
                    await anext(stream)
                with pytest.raises(serving.QueueFullError, match="no slot was free"):
                    await stream.completion()
            assert shared.num_waiting == 0
            assert not late[0].is_admitted

    asyncio.run(run())


def test_who_does_not_read_is_cancelled(engine):
    async def run():
        async with serving.AsyncEngine(engine, max_unread_tokens=5) as shared:
            slow = shared.submit([1, 2, 3], **LONG)
            dropped = shared.submit([4, 5], **LONG)
            assert len(await read(shared.submit([7], max_new_tokens=3, stop_token_ids=()))) == 3
            del dropped
            until(lambda: shared.num_unfinished == 0)
            assert engine.metrics.used_blocks == 0
            assert 5 < len(await slow.batch()) <= 5 + engine.plan.draft_tokens + 1
            with pytest.raises(serving.SlowReaderError):
                await anext(slow)
            whole = await shared.submit([8], max_new_tokens=30, stop_token_ids=()).completion()
            assert len(whole.token_ids) == 30  # of a reader that wants the end alone

    asyncio.run(run())


def test_one_coroutine_reads_a_stream(engine):
    async def run():
        async with serving.AsyncEngine(engine, max_waiting=9) as shared:
            for stream in [shared.submit([i], **LONG) for i in range(4)]:
                await anext(stream)
            waits = shared.submit([1], **LONG)
            first = asyncio.ensure_future(anext(waits))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="one coroutine at a time"):
                await anext(waits)
            first.cancel()

    asyncio.run(run())


@pytest.fixture
def failing(engine, monkeypatch):
    """Makes steps raise that serve a request whose prompt begins with 13."""
    fail_with_prompts_of(13, engine, monkeypatch, message="no step with 13")


@pytest.mark.usefixtures("failing")
def test_a_failing_step_ends_who_makes_it_fail(engine, caplog):
    asked = {"max_new_tokens": 12, "stop_token_ids": ()}
    texts = [[1, 2], [3, 4, 5]]
    expected = [done.token_ids for done in engine.generate(texts, **asked)]

    async def run():
        async with serving.AsyncEngine(engine) as shared:
            good = [shared.submit(text, **asked) for text in texts]
            bad = shared.submit([13, 1], **asked)
            assert await asyncio.gather(*map(read, good)) == expected
            with pytest.raises(serving.RequestFailedError, match="no step with 13"):
                await anext(bad)
            assert (await bad.completion()).finish_reason == "error"
            assert await read(shared.submit(texts[0], **asked)) == expected[0]

    asyncio.run(run())
    assert "a step raised" in caplog.text


def test_an_engine_that_is_broken_ends_all(engine, monkeypatch, caplog):
    async def run():
        async with serving.AsyncEngine(engine) as shared:
            streams = [shared.submit([1, 2], **LONG), shared.submit([3], **LONG)]
            await anext(streams[0])
            with monkeypatch.context() as patch:
                patch.setattr(engine, "step", lambda: 1 / 0)
                for stream in streams:
                    with pytest.raises(serving.EngineClosedError) as caught:
                        await read(stream)
                    assert isinstance(caught.value.__cause__, ZeroDivisionError)
                    with pytest.raises(serving.EngineClosedError):
                        await stream.completion()
            assert not shared.is_serving
            with pytest.raises(serving.EngineClosedError):
                shared.submit([1])

    asyncio.run(run())
    assert caplog.text.count("a step raised") == stepper.MAX_FAILURES


def test_closing_ends_streams_and_the_exception_goes_on(engine):
    async def run():
        ends = []

        async def read_to_the_end(stream):
            try:
                await read(stream)
            except serving.EngineClosedError as error:
                ends.append(error)

        async with serving.AsyncEngine(engine) as shared:
            tasks = [
                asyncio.create_task(read_to_the_end(shared.submit([i], **LONG))) for i in range(6)
            ]
            await asyncio.sleep(0.05)
            raise KeyError("mine") from None
        await asyncio.gather(*tasks)
        return ends

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(run())


def test_a_loop_that_is_closed_or_dropped_leaves_no_thread(engine):
    shared = serving.AsyncEngine(engine)
    alive = weakref.ref(shared)
    loop = asyncio.new_event_loop()
    streams = [shared.submit([i], **LONG) for i in range(3)]
    loop.run_until_complete(anext(streams[0]))
    waiting = [loop.create_task(read(stream)) for stream in streams]
    loop.run_until_complete(asyncio.sleep(0.02))
    loop.close()
    until(lambda: alive().num_unfinished == 0)
    for task in waiting:
        task._log_destroy_pending = False
    del shared, streams, waiting, loop, task
    gc.collect()
    until(lambda: alive() is None)
    until(lambda: "dsv4-jax-engine" not in {thread.name for thread in threading.enumerate()})


def test_one_call_wakes_all_streams_of_a_loop(engine):
    """However many streams there are, a step costs the event loop one wake-up."""

    async def run():
        loop, calls = asyncio.get_running_loop(), []
        plain = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: calls.append(args) or plain(*args)
        async with serving.AsyncEngine(engine) as shared:
            before = engine.metrics.steps
            asked = {"max_new_tokens": 25, "stop_token_ids": (), "speculate": False}
            streams = [shared.submit([i, 5], **asked) for i in range(4)]
            await asyncio.gather(*map(read, streams))
            return len(calls), engine.metrics.steps - before

    woken, steps = asyncio.run(run())
    assert woken <= steps


PROGRAM = """
import asyncio
from dsv4_jax import serving
from helpers.serving import make_engine

shared = serving.AsyncEngine(make_engine())
stream = shared.submit([1, 2], max_new_tokens=600, stop_token_ids=())
async def main():
    print((await anext(stream)).finish_reason)
    {end}
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "1 / 0"])
def test_a_process_ends_with_its_engine_in_use(end):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout == "None\n"
    assert run.returncode == ("/" in end)
    assert "Fatal" not in run.stderr
