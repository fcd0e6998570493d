"""Steps overlap the host: the next one is launched before the last one is read, to the same tokens.

Engines that are compared run steps of one program each, so that equal means equal to the bit.
"""

import functools

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving.device import engine_arrays
from dsv4_jax.serving.schedule.running import Running
from helpers import serving, slow
from helpers.engine_life import Life
from helpers.serving import drain, limit, make_engine, prompt, run_to_end
from helpers.simulated_device import simulated_engine

WANTED = {"max_new_tokens": 20, "stop_token_ids": ()}
model = functools.cache(serving.one_layer)


def plain_engine(**changes):
    """With the program that only decodes."""
    sizes = {"draft_tokens": 0, "decode_tokens": None, "cache_format": "f32"}
    return ds.Engine(*model(), **(serving.SIZES | sizes | changes))


each_engine = pytest.mark.parametrize(
    "make", slow.all_but([make_engine], [plain_engine, make_engine])
)
"""By default the one whose program other files have too; `test_steps_per_call.py` has the other."""


def record(engine, monkeypatch):
    """What the engine asks of the devices, in order: (launch, number) and (read, number)."""
    devices, calls, launched = engine.loop.runner.devices, [], iter(range(10**6))
    step, read = devices.launch, devices.read
    last = [0]

    def launch(*arguments, **options):
        last[0] = next(launched)
        calls.append(("launch", last[0]))
        return step(*arguments, **options)

    def fetch(back):
        calls.append(("read", last[0] - back))
        return read(back)

    monkeypatch.setattr(devices, "launch", launch)
    monkeypatch.setattr(devices, "read", fetch)
    return calls


def overlapped(calls):
    """Steps that were read after the next one had been launched."""
    order = {call: place for place, call in enumerate(calls)}
    steps = [number for name, number in calls if name == "read"]
    return [n for n in steps if order.get(("launch", n + 1), len(calls)) < order["read", n]]


@each_engine
def test_inputs_that_stay_are_not_brought_again_and_none_moves(monkeypatch, make):
    """XLA rewrites a CUDA graph where an array of it has moved. One array comes back."""
    engine, steps = make(), []
    arrays = engine.loop.runner.devices
    launcher = arrays.launcher

    def note(program, *arguments, **static):
        result = launcher(program, *arguments, **static)
        leaves = jax.tree.leaves(arguments[-2])
        stay = result[0] if program is engine_arrays.jit_plain_trunk else result  # not the logits
        places = [leaf.unsafe_buffer_pointer() for leaf in [*leaves, *jax.tree.leaves(stay)]]
        shown = [jax.tree.leaves(one) for one in arrays.unread]
        step_input = getattr(arguments[-2], "step_input", arguments[-2])
        size = program, step_input.token_ids.size
        steps.append((size, tuple(map(id, leaves)), tuple(places), shown))
        return result

    monkeypatch.setattr(arrays, "launcher", note)
    rng = np.random.default_rng(0)
    ids = [engine.submit(prompt(rng, n), **WANTED) for n in (30, 5)]
    while min(engine.requests[one].num_drawn for one in ids) < 2:
        engine.step()
    steps.clear()
    for _ in range(5):
        engine.step()
    assert len({leaves for _, leaves, _, _ in steps}) == 1
    run_to_end(engine, *ids, engine.submit(prompt(rng, 7), **WANTED))
    assert len({leaves for _, leaves, _, _ in steps}) > 1
    assert len({places for _, _, places, _ in steps}) == len({size for size, _, _, _ in steps})
    assert {len(leaves) for _, _, _, shown in steps for leaves in shown} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain_engine, make_engine])
def test_steps_of_simple_draws_are_taken_where_no_request_asks_for_more(monkeypatch, make):
    """As on a GPU; tokens are those of the program for all draws."""
    rng = np.random.default_rng(3)
    texts = [prompt(rng, n) for n in (12, 5, 9)]
    settings = [
        {},
        {"temperature": 0.8, "seed": 2, "min_p": 0.01},
        {"temperature": 1.2, "top_k": 9},
    ]
    ends = [30, 30, 6]
    answers, simple = [], []
    for simplifies in (False, True):
        engine = make()
        engine.loop.runner.simplifies = simplifies
        devices, simple = engine.loop.runner.devices, []

        def noted(launch, simple=simple, engine=engine):
            def note(*arrays, **static):
                running = engine.loop.queue.running.values()
                asks = {request.sampling.top_k for request in running}
                simple.append((static["is_simple"], asks))
                return launch(*arrays, **static)

            return note

        for name in ("launch", "launch_draw"):
            monkeypatch.setattr(devices, name, noted(getattr(devices, name)))
        ids = [
            engine.submit(text, max_new_tokens=end, stop_token_ids=(), **asked)
            for text, end, asked in zip(texts, ends, settings, strict=True)
        ]
        answers.append([one.token_ids for one in run_to_end(engine, *ids)])
        assert any(is_simple for is_simple, _ in simple) == simplifies
    assert answers[0] == answers[1]
    assert all(9 not in asks for is_simple, asks in simple if is_simple)
    assert not any(is_simple for is_simple, _ in simple[:1])  # prompts


@each_engine
def test_each_step_is_launched_before_the_last_one_is_read(monkeypatch, make):
    """Prompts, decoding, drafts and an admission in between; only the last step has no next."""
    engine = make()
    calls = record(engine, monkeypatch)
    rng = np.random.default_rng(0)
    ids = [engine.submit(prompt(rng, n), **WANTED) for n in (60, 5)]
    for _ in range(8):
        assert engine.step() or engine.metrics.steps < 4
        assert sum(name == "launch" for name, _ in calls) == engine.metrics.steps + 1
    ids.append(engine.submit(prompt(rng, 70), **WANTED))
    run_to_end(engine, *ids)
    launches = [number for name, number in calls if name == "launch"]
    reads = [number for name, number in calls if name == "read"]
    assert reads == launches[: len(reads)]
    assert len(overlapped(calls)) >= len(reads) - 1
    assert engine.loop.flight is None


def test_who_ends_for_its_length_has_no_row_in_the_step_after_it(monkeypatch):
    """Steps that repeat each other stop doing so there; each row that ran drew a token.

    Steps that only decode have a program of their own here, as those do that repeat each other.
    """
    sizes = {"prefill_tokens": (64, 256), "max_requests": 4, "max_context_tokens": 640}
    engine, _, devices = simulated_engine(**sizes)
    rows, plans = [], []

    def note(step_input, *rest, launch=devices.launch, **options):
        rows.append(int(np.count_nonzero(step_input.request_ids >= 0)))
        plans.append(engine.loop.flight.plan if engine.loop.flight else None)
        launch(step_input, *rest, **options)

    monkeypatch.setattr(devices, "launch", note)
    lengths = (5, 9)
    ids = [engine.submit([n], max_new_tokens=n, stop_token_ids=()) for n in lengths]
    run_to_end(engine, *ids)
    assert len(set(map(id, plans))) < len(plans) - 3  # steps repeated each other
    assert sum(rows) == sum(lengths)


def test_without_overlap_each_step_is_read_before_the_next(monkeypatch):
    engine = make_engine(overlap=False)
    calls = record(engine, monkeypatch)
    run_to_end(engine, engine.submit([1, 2, 3], **WANTED))
    assert overlapped(calls) == []
    assert not make_engine(debug=True).plan.overlap


@each_engine
def test_penalties_count_what_the_host_has_not_read(monkeypatch, make):
    """Tokens are those of steps that wait for each other, and others beside them too."""
    asked = [{"frequency_penalty": 2.0}, {}, {"presence_penalty": 2.0, "temperature": 0.9}]
    answers = []
    for overlap in (True, False):
        engine = make(overlap=overlap)
        calls = record(engine, monkeypatch)
        ids = [engine.submit([1, 2], **WANTED, **more) for more in asked]
        answers.append([one.token_ids for one in run_to_end(engine, *ids)])
        steps = sum(name == "read" for name, _ in calls)
        assert len(overlapped(calls)) >= steps - 2 if overlap else not overlapped(calls)
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_counts_that_find_no_room_together_wait_for_the_host(monkeypatch):
    engine = make_engine()
    calls = record(engine, monkeypatch)
    monkeypatch.setattr(
        engine.loop.runner, "fitting", lambda running: Running(running, running.known)
    )
    run_to_end(engine, engine.submit([1, 2], **WANTED, presence_penalty=1.0))
    assert overlapped(calls) == []


@each_engine
def test_tokens_are_those_without_overlap(make):
    """Requests that stop by a token, at their length or at once, sampled and greedy."""
    rng, found = np.random.default_rng(1), []
    # With two programs all have slots at once, so that each token comes in the same program.
    texts = [prompt(rng, int(n)) for n in rng.integers(1, 60, 4 if make is plain_engine else 12)]
    stops = rng.integers(0, 96, (len(texts), 9))
    for overlap in (True, False):
        engine = make(overlap=overlap)
        ids = [
            engine.submit(
                text, max_new_tokens=1 + 9 * (i % 5), temperature=float(i % 2), seed=i,
                stop_token_ids=tuple(stops[i].tolist()), salt=str(i),
            )
            for i, text in enumerate(texts)
        ]  # fmt: skip
        found.append(run_to_end(engine, *ids))
        assert engine.metrics.finished.keys() == {"length", "stop"}
        assert engine.metrics.used_blocks == 0
        assert not engine.verify().problems
    assert found[0] == found[1]


@each_engine
def test_snapshots_of_answers_are_those_without_overlap(make):
    """It crosses a boundary in a step that was planned before its tokens were known."""
    text, kept, done = prompt(np.random.default_rng(3), 240), [], []
    for overlap in (True, False):
        engine = make(overlap=overlap)
        (first,) = run_to_end(engine, engine.submit(text, max_new_tokens=50, stop_token_ids=()))
        kept.append(engine.metrics.snapshots)
        more = [*text, *first.token_ids]
        (second,) = run_to_end(engine, engine.submit(more, max_new_tokens=9, stop_token_ids=()))
        assert engine.metrics.hit_tokens == 256
        done.append((first, second))
        tree = engine.loop.shards.managers[0].prefixes.tree
        assert tree.num_free_snapshots + tree.num_held_snapshots == tree.num_snapshots
    assert done[0] == done[1]
    assert kept == [2, 2]


def test_what_leaves_with_a_step_in_flight():
    """Cancelled, pushed out, or taken for another request: the row in flight changes nothing."""
    engine, rng = make_engine(), np.random.default_rng(4)
    texts = [prompt(rng, n) for n in (30, 9, 20, 40, 12)]
    wanted = run_to_end(engine, *(engine.submit(text, **WANTED, salt="a") for text in texts))
    ids = [engine.submit(text, **WANTED, salt="b") for text in texts]
    while engine.requests[ids[3]].num_drawn < 3:
        engine.step()
    assert engine.loop.flight is not None
    assert engine.cancel(ids[0])  # whose slot the last one gets
    assert engine.preempt(ids[1])  # which comes back
    known = engine.requests[ids[2]].known.tolist()
    fork = engine.fork(ids[2], seed=0)
    assert engine.requests[fork].known.tolist() == known
    done = run_to_end(engine, *ids[1:], fork)
    assert done == [*wanted[1:], wanted[2]]
    cut = engine.completion(ids[0])
    assert cut.token_ids == wanted[0].token_ids[: len(cut.token_ids)]
    assert not engine.verify().problems


def test_a_step_in_flight_that_nobody_waits_for_is_dropped():
    engine = make_engine()
    ids = [engine.submit([3, 1, 4], **WANTED) for _ in range(2)]
    engine.step()
    for request_id in ids:
        engine.cancel(request_id)
    assert engine.loop.flight is None
    assert engine.step() == []


def test_verify_waits_for_the_step_in_flight_and_the_next_step_tells():
    """Looking changes nothing: what a step drew comes with the next one, and no sooner."""
    engine = make_engine()
    request_id = engine.submit([3, 1, 4], **WANTED, speculate=False)
    told = list(engine.step())
    drawn = engine.requests[request_id].num_drawn
    held = engine.loop.shards.length_tokens[0]
    assert not engine.verify().problems
    assert engine.loop.shards.length_tokens[0] == held + 1
    assert engine.requests[request_id].num_drawn == drawn
    steps = engine.metrics.steps
    assert not engine.verify().problems
    assert engine.metrics.steps == steps
    while engine.num_unfinished:
        told += engine.step()
    assert [one.token_id for one in told] == engine.completion(request_id).token_ids
    last = engine.submit([3, 1, 4], max_new_tokens=2, stop_token_ids=(), speculate=False)
    engine.step()
    engine.verify()
    assert engine.requests[last].finish_reason is None
    assert [one.finish_reason for one in engine.step()] == ["length"]


@pytest.mark.parametrize("name", ["launch", "read"])
@pytest.mark.parametrize("number", slow.all_but([0, 4], [0, 1, 4, 9]))
def test_a_device_that_fails_with_a_step_in_flight(monkeypatch, name, number):
    """Both steps are forgotten and computed again."""
    engine, rng = make_engine(), np.random.default_rng(5)
    texts = [prompt(rng, n) for n in (60, 9)]
    wanted = run_to_end(engine, *(engine.submit(text, **WANTED, salt="a") for text in texts))
    ids = [engine.submit(text, **WANTED, salt="b") for text in texts]
    devices, calls = engine.loop.runner.devices, iter(range(10**6))
    method = getattr(devices, name)

    def fail(*arguments, **options):
        if next(calls) == number:
            for leaf in jax.tree.leaves(engine.cache):
                leaf.delete()
            raise RuntimeError("lost")
        return method(*arguments, **options)

    monkeypatch.setattr(devices, name, fail)
    with pytest.raises(RuntimeError, match="lost"):
        run_to_end(engine, *ids)
    assert run_to_end(engine, *ids) == wanted
    assert not engine.verify().problems


@pytest.mark.parametrize(
    ("seed", "scarce"),
    [
        (0, True),
        *(
            pytest.param(seed, scarce, marks=pytest.mark.slow)
            for seed in range(1, 9)
            for scarce in (False, True)
        ),
    ],
)
def test_random_lives_get_what_an_engine_without_overlap_gives(seed, scarce):
    """Stops, forks, cancels, preemptions, hits, drafts, penalties; or few blocks besides."""
    engine = limit(make_engine(), num_blocks=6, num_snapshots=5) if scarce else make_engine()
    life = Life(engine, 50 + seed)
    for _ in range(60 if not seed else 400):
        life.event()
    drain(engine)
    life.finish()
    assert engine.metrics.drafted_tokens > 0
