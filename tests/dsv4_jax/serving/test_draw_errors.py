"""An error that belongs to one request at its draw ends that request, and nobody else notices."""

import asyncio
import functools

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax import serving
from dsv4_jax.serving import Grammar
from helpers import failing_grammars, slow
from helpers.serving import BUCKET, SIZES, byte_tokenizer, one_layer, run_to_end

pytestmark = [pytest.mark.unoptimised, pytest.mark.slow]

END, VOCAB = 257, 260
OPEN = {"max_new_tokens": 12, "stop_token_ids": ()}
FREE = {"grammar": Grammar("regex", "[a-z]{30}"), "max_new_tokens": 12, "salt": "grammar"}
SHAPES = {
    "overlap": {"draft_tokens": 0},
    "no overlap": {"draft_tokens": 0, "overlap": False},
    "drafts": {},
    "calls of four": {"draft_tokens": 0, "decode_tokens": None, "steps_per_call": 4},
    "debug": {"draft_tokens": 0, "debug": True},
}
FAILURES = [
    ("raises", 0, "RuntimeError: the grammar is lost"),
    ("raises", 4, "RuntimeError: the grammar is lost"),
    ("allows nothing", 0, "ValueError: the grammar allows no token"),
    ("takes nothing", 3, "ValueError: the grammar cannot go on"),
]
each_shape = pytest.mark.parametrize("shape", slow.all_but(["drafts"], list(SHAPES)))


@functools.cache
def engine_of(shape):
    model = one_layer(vocab_size=VOCAB, eos_token_ids=(END,))
    sizes = SIZES | {"tokenizer": byte_tokenizer()} | SHAPES[shape]
    return ds.Engine(*model, **sizes)


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in (30, 5, 80)[:count]]


@functools.cache
def alone(shape):
    """What requests get that nobody disturbs."""
    engine = engine_of(shape)
    return [run_to_end(engine, engine.submit(text, **OPEN, salt="alone"))[0] for text in texts(3)]


@pytest.fixture
def fail_grammars(monkeypatch):
    """Makes grammars of requests fail after so many tokens."""
    return functools.partial(failing_grammars.fail, monkeypatch)


def check_nothing_is_held(engine):
    assert not engine.verify().problems
    metrics = engine.metrics
    assert (metrics.running, metrics.waiting, metrics.used_blocks) == (0, 0, 0)


@each_shape
@pytest.mark.parametrize(
    ("how", "at", "message"),
    slow.all_but(
        [FAILURES[0], FAILURES[3]],
        FAILURES,
    ),
)
def test_a_grammar_that_fails_ends_its_request_alone(shape, how, at, message, fail_grammars):
    """After a prompt of one step or many; no step raises, and nothing is computed again."""
    engine = engine_of(shape)
    wanted = alone(shape)
    fail_grammars(engine, how, at)
    managers = engine.loop.shards.managers
    for length in (3, BUCKET + 1, 5 * BUCKET):
        good = [engine.submit(text, **OPEN, salt="beside") for text in texts(3)]
        bad = engine.submit([7] * length, **FREE)
        preempted = engine.metrics.preempted
        done = run_to_end(engine, *good)
        assert done == wanted
        failed = engine.completion(bad)
        assert (failed.finish_reason, len(failed.token_ids) <= at) == ("error", True)
        assert failed.error.startswith(message)
        assert engine.loop.shards.managers is managers
        assert engine.metrics.preempted == preempted
        check_nothing_is_held(engine)


@pytest.mark.slow
def test_an_answer_that_its_grammar_leaves_half_way_has_not_stopped():
    """There llguidance allows the end token, as if the answer were whole."""
    engine = engine_of("drafts")
    grammar = Grammar("lark", f'start: "{"x" * 30}" T\nT: "a" & "b"')
    failed = run_to_end(engine, engine.submit([7], grammar=grammar, max_new_tokens=40))[0]
    assert failed.token_ids == [*b"x" * 30]
    assert failed.finish_reason == "error"
    assert failed.error.startswith("ValueError: the grammar allows no token: nothing fulfils it")


def test_streams_and_lists_of_prompts_go_on_beside_it(fail_grammars):
    engine = engine_of("drafts")
    fail_grammars(engine, "raises", 3)
    good, bad = engine.submit(texts(1)[0], **OPEN), engine.submit([7] * 60, **FREE)
    assert len(list(engine.stream(bad))) == 3
    assert [one.token_id for one in engine.stream(good)] == alone("drafts")[0].token_ids
    assert [engine.completion(one).finish_reason for one in (bad, good)] == ["error", "length"]
    settings = [
        ds.SamplingParams(max_new_tokens=12, stop_token_ids=()),
        ds.SamplingParams(max_new_tokens=12, grammar=FREE["grammar"]),
    ]
    done = engine.generate([texts(1)[0], [7] * 60], sampling=settings)
    assert done[0] == alone("drafts")[0]
    assert (done[1].finish_reason, len(done[1].token_ids)) == ("error", 3)
    check_nothing_is_held(engine)


def test_samples_of_a_prompt_whose_first_fails(fail_grammars):
    """Each has an error of its own, and who waits for the first is not left waiting."""
    engine = engine_of("drafts")
    fail_grammars(engine, "raises", 0)
    ids = engine.submit_many([7] * 60, 3, grammar=FREE["grammar"], max_new_tokens=9)
    assert {one.finish_reason for one in run_to_end(engine, *ids)} == {"error"}
    check_nothing_is_held(engine)


def test_coroutines_get_an_error_each(fail_grammars):
    engine = engine_of("drafts")
    fail_grammars(engine, "raises", 2)
    wanted = [one.token_ids for one in alone("drafts")]

    async def read(stream):
        return [token.token_id async for token in stream]

    async def run():
        async with serving.AsyncEngine(engine) as shared:
            good = [shared.submit(text, **OPEN) for text in texts(3)]
            bad = [shared.submit([7] * length, **FREE) for length in (3, 60)]
            ended = await asyncio.gather(*map(read, bad), return_exceptions=True)
            assert [type(one) for one in ended] == [serving.RequestFailedError] * 2
            assert "the grammar is lost" in str(ended[0])
            assert [(await one.completion()).finish_reason for one in bad] == ["error"] * 2
            assert await asyncio.gather(*map(read, good)) == wanted
            assert shared.is_serving

    asyncio.run(run())
    check_nothing_is_held(engine)


@each_shape
@pytest.mark.parametrize("at", slow.all_but([5], [0, 5]))
def test_a_step_that_raises_whenever_one_request_draws(shape, at, monkeypatch):
    """Nothing names the request; its prompt takes several steps, each of which goes well alone."""
    engine = engine_of(shape)
    wanted = alone(shape)
    run = engine.loop.runner.run

    def fail(plan, requests, *rest):
        for row in plan.rows:
            request = requests[row.slot]
            if row.draws and request.token_ids[0] == 251 and request.num_drawn >= at:
                raise ZeroDivisionError("lost")
        return run(plan, requests, *rest)

    monkeypatch.setattr(engine.loop.runner, "run", fail)
    for length in (3, 4 * BUCKET):
        ids = [engine.submit(text, **OPEN) for text in texts(2)]
        bad = engine.submit([251] + [1] * (length - 1), **OPEN)
        ids.append(engine.submit(texts(3)[2], **OPEN))
        raised = steps = 0
        while engine.num_unfinished:
            steps += 1
            assert steps < 150
            try:
                engine.step()
            except ZeroDivisionError:
                raised += 1
        assert raised <= 2
        assert [engine.completion(one) for one in ids] == wanted
        failed = engine.completion(bad)
        assert (failed.finish_reason, failed.error) == ("error", "ZeroDivisionError: lost")
        assert len(failed.token_ids) <= at + SIZES["draft_tokens"]
        check_nothing_is_held(engine)


def test_one_error_among_many_steps_is_nobodys(monkeypatch):
    """Whoever has drawn past it is no suspect; another error much later is a first one again."""
    engine = engine_of("drafts")
    run, calls = engine.loop.runner.run, iter(range(10**6))

    def fail(*arguments):
        if next(calls) in (4, 20):
            raise ZeroDivisionError("lost")
        return run(*arguments)

    monkeypatch.setattr(engine.loop.runner, "run", fail)
    wanted = run_to_end_through(engine, 30)
    assert wanted[1] == 2
    assert wanted[0].finish_reason == "length"
    monkeypatch.undo()
    assert run_to_end_through(engine, 30) == (wanted[0], 0)


def run_to_end_through(engine, count):
    """A request's completion, and how many steps raised."""
    request_id, raised = engine.submit([9, 9, 1], max_new_tokens=count, stop_token_ids=()), 0
    while engine.num_unfinished:
        try:
            engine.step()
            assert engine.suspects.next() is None
        except ZeroDivisionError:
            raised += 1
    return engine.completion(request_id), raised
