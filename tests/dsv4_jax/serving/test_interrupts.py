"""Interrupts at any line, calls from a second thread, and streams that are dropped.

All runs are steps of one program, so that equal means equal to the bit.
"""

import concurrent.futures
import contextlib
import functools
import random

import jax
import numpy as np
import pytest

from dsv4_jax.serving.device import step_result
from helpers import slow
from helpers.interrupts import (
    Failure,
    Interrupt,
    Life,
    Lines,
    Signals,
    scarce_engine,
    truth,
)
from helpers.serving import make_engine, prompt, run_to_end


@functools.cache
def undisturbed():
    """An engine, the answers of its first life, and how often each line ran in a second one."""
    engine, lines = scarce_engine(), Lines()
    answers = Life(engine, lines).run()
    lines.counts.clear()
    assert Life(engine, lines).run() == answers
    return engine, answers, dict(lines.counts)


def disturbed(chosen, error=Interrupt):
    """A life with interrupts at chosen lines, {line: which time}; the lines that raised."""
    engine, answers, _ = undisturbed()
    lines = Lines(chosen, error)
    assert Life(engine, lines).run() == answers
    return set(lines.raised)


def is_a_tokenizer_error(line):
    """What is raised while a token is added is taken for its request's own error."""
    around = ("HandOut._add_alone", "Request.known", "Request.num_", "Request._whole_texts")
    is_text = line.file in ("text.py", "token_texts.py")
    return is_text or line.function.startswith(("Request.add", *around))


@pytest.mark.slow
def test_a_life_has_all_that_happens_to_requests():
    engine, answers, counts = undisturbed()
    metrics = engine.metrics
    assert min(metrics.preempted, metrics.evicted_blocks, metrics.evicted_snapshots) > 0
    assert min(metrics.drafted_tokens, metrics.hit_tokens, metrics.finished["cancelled"]) > 0
    assert len({(line.file, line.function) for line in counts}) > 140
    assert answers["fork"] == answers["cold"]


@pytest.mark.parametrize("every", slow.all_but([], [1, 2]))
def test_an_interrupt_in_any_function_changes_no_token(every):
    """One line of each, or of every second one, the first time it runs."""
    rng, functions = random.Random(0), {}
    for line in sorted(undisturbed()[2]):
        functions.setdefault((line.file, line.function), []).append(line)
    chosen = {rng.choice(lines): 1 for lines in list(functions.values())[::every]}
    raised = disturbed(chosen)
    assert len(raised) > 0.95 * len(chosen)


def id_life(engine, lines):
    """Requests of ids alone, which are counted in arrays, with interrupts in steps."""
    rng, salt = np.random.default_rng(7), str(engine.next_id)
    texts = [prompt(rng, n) for n in (130, 9, 30, 3, 20)]
    ids = [
        engine.submit(text, max_new_tokens=3 + n, stop_token_ids=(5,), salt=salt)
        for n, text in enumerate(texts)
    ]
    while engine.num_unfinished:
        known = truth(engine)
        try:
            with lines.tracing("step"):
                engine.step()
        except Interrupt:
            engine.undo.roll_back()
            assert truth(engine) == known
    assert not engine.verify().problems
    assert engine.metrics.first_token_s.count == engine.metrics.submitted
    assert engine.metrics.first_token_s.count + engine.metrics.token_s.count == (
        engine.metrics.generated_tokens
    )
    return [engine.completion(one) for one in ids]


FILES_OF_A_STEP = (
    "hand_out.py", "known_tokens.py", "running.py", "flight.py", "loop.py", "runner.py", "calls.py",
    "request_queue.py", "step_result.py",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "every"),
    [
        (0.4, 12),
        pytest.param(0.0, 1, marks=pytest.mark.slow),
        pytest.param(0.6, 1, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_where_tokens_are_counted_in_arrays(place, every):
    """Lines of what launches, reads and counts a step; without a tokenizer."""
    engine, lines = make_engine(), Lines()
    answers = id_life(engine, lines)
    counts = dict(lines.counts)
    chosen = [line for line in sorted(counts) if line.file in FILES_OF_A_STEP]
    random.Random(0).shuffle(chosen)
    chosen, raised = chosen[::every], 0
    for start in range(0, len(chosen), 40):
        some = {one: 1 + int(place * (counts[one] - 1)) for one in chosen[start : start + 40]}
        lines = Lines(some)
        assert id_life(engine, lines) == answers
        raised += len(lines.raised)
    assert raised > 0.7 * len(chosen)


@pytest.mark.slow
def test_an_error_in_any_function_changes_no_token():
    """Of a signal's handler, say; what the engine catches by itself must not hide it.

    One in each life: of several that follow each other soon, one would end its request.
    """
    lines = [line for line in sorted(undisturbed()[2]) if not is_a_tokenizer_error(line)]
    files = ("request_queue.py", "loop.py", "manager.py")
    chosen = [line for line in lines if line.file in files][::24]
    assert sum(len(disturbed({line: 1}, Failure)) for line in chosen) == len(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("error", [Interrupt, Failure])
def test_an_interrupt_at_any_line_changes_no_token(error):
    """Every line: the first time that it runs, the middle one, and the last."""
    counts, tried, missed = undisturbed()[2], 0, 0
    rng = random.Random(1)
    for place in (0.0, 0.5, 1.0):
        lines = sorted(counts)
        if error is Failure:
            lines = [line for line in lines if not is_a_tokenizer_error(line)]
        rng.shuffle(lines)
        several = 20
        if error is Failure:  # one in each life, as above
            lines, several = lines[:200], 1
        for start in range(0, len(lines), several):
            chosen = {
                line: 1 + int(place * (counts[line] - 1)) for line in lines[start : start + several]
            }
            tried += len(chosen)
            missed += len(chosen) - len(disturbed(chosen, error))
    print(f"\n{tried} lines, {tried - missed} interrupts")
    assert missed < (0.1 if error is Interrupt else 0.35) * tried


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_thousand_signals_change_no_token():
    """At any time of a call, in XLA's and Python's own code too."""
    engine, answers, _ = undisturbed()
    signals, late = Signals(random.Random(2), 1000), 0
    while signals.raised < 1000:
        life = Life(engine, signals)
        assert life.run() == answers
        late += life.num_late
    print(f"\n{signals.raised} signals, {late} of them after the end of a call")


def test_an_interrupt_between_the_new_cache_and_its_count(monkeypatch):
    """The device is a step ahead of the host then."""
    engine, rng = make_engine(), np.random.default_rng(1)
    texts = [prompt(rng, n) for n in (30, 9)]
    options = {"max_new_tokens": 8, "stop_token_ids": ()}
    wanted = run_to_end(engine, *(engine.submit(text, **options) for text in texts))
    ids = [engine.submit(text, **options) for text in texts]
    for _ in range(3):
        engine.step()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    known = truth(engine)
    with monkeypatch.context() as patch:
        patch.setattr(step_result.StepResult, "of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert truth(engine) == known
    assert run_to_end(engine, *ids) == wanted


def calls(engine, request_id, stream, cached=None):
    """Every public method, as a call that would change something."""
    return {
        "submit": lambda: engine.submit([1, 2], max_new_tokens=2),
        "submit_checked": lambda: engine.submit_checked(None, [1]),
        "submit_many": lambda: engine.submit_many([1, 2], 2, max_new_tokens=2),
        "fork": lambda: engine.fork(request_id, seed=1),
        "cancel": lambda: engine.cancel(request_id),
        "preempt": lambda: engine.preempt(request_id),
        "step": engine.step,
        "completion": lambda: engine.completion(request_id),
        "verify": engine.verify,
        "warmup": engine.warmup,
        "snapshot": lambda: engine.snapshot(request_id),
        "restore": lambda: engine.restore(cached),
        "generate": lambda: engine.generate([[1, 2]], max_new_tokens=2),
        "stream": lambda: next(stream),
        "close": engine.close,
        "close of a stream": stream.close,
    }


@pytest.mark.parametrize("from_inside", [False, True])
def test_a_second_call_is_refused_before_it_touches_anything(monkeypatch, from_inside):
    """Of another thread, or of the same, as a signal handler's or a tokenizer's is."""
    engine, text = make_engine(), [3, 1, 4, 1, 5]
    options = {"max_new_tokens": 8, "stop_token_ids": ()}
    wanted = run_to_end(engine, engine.submit(text, **options))
    request_id = engine.submit(text, **options)
    engine.step()
    cached = engine.snapshot(request_id)
    second = calls(engine, request_id, engine.stream(request_id), cached)
    public = {name for name in dir(type(engine)) if callable(getattr(type(engine), name))}
    assert {name for name in public if name[0] != "_"} - {"from_checkpoint", "follow"} == set(
        second
    ) - {"close of a stream"}
    run, known = engine.loop.runner.run, truth(engine)
    refused = {}

    def call_all():
        before = truth(engine), engine.loop.shards.managers[0].ledger()
        for name, call in second.items():
            with pytest.raises(RuntimeError, match="does one call at a time") as caught:
                call()
            refused[name] = str(caught.value)
        after = truth(engine), engine.loop.shards.managers[0].ledger()
        assert before[0] == after[0]
        jax.tree.map(np.testing.assert_array_equal, vars(before[1]), vars(after[1]))
        assert engine.num_unfinished == 1

    def run_and_call(*arguments):
        if from_inside:
            call_all()
        else:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(call_all).result()
        return run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner, "run", run_and_call)
        engine.step()
    assert set(refused) == set(second)
    assert "submit was called" in refused["submit"]
    assert "one lock" in refused["submit"]
    assert truth(engine) != known
    assert run_to_end(engine, request_id) == wanted


def test_a_call_from_inside_that_is_not_caught_undoes_the_step(monkeypatch):
    engine = make_engine()
    options = {"max_new_tokens": 8, "stop_token_ids": ()}
    wanted = run_to_end(engine, engine.submit([3, 1, 4], **options))
    request_id = engine.submit([3, 1, 4], **options)
    known = truth(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner, "run", lambda *_: engine.cancel(request_id))
        with pytest.raises(RuntimeError, match="cancel was called"):
            engine.step()
    assert truth(engine) == known
    assert run_to_end(engine, request_id) == wanted


def test_a_stream_that_is_dropped_in_the_middle_of_a_step(monkeypatch):
    """By the garbage collection of another thread, say: it is cancelled with the next call."""
    engine = make_engine()
    options = {"max_new_tokens": 8, "stop_token_ids": ()}
    wanted = run_to_end(engine, engine.submit([3, 1, 4], **options))
    kept, dropped = (engine.submit([3, 1, 4], **options) for _ in range(2))
    streams = [engine.stream(dropped)]
    next(streams[0])
    run = engine.loop.runner.run

    def run_and_drop(*arguments):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(streams.clear).result()
        return run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner, "run", run_and_drop)
        engine.step()
    assert engine.metrics.running == 2
    assert run_to_end(engine, kept) == wanted
    assert engine.completion(dropped).finish_reason == "cancelled"
    assert not engine.verify().problems


def test_a_stream_that_is_closed_before_its_first_token():
    engine = make_engine()
    request_id = engine.submit([1, 2], max_new_tokens=3)
    with engine.stream(request_id) as stream:
        pass
    assert engine.completion(request_id).finish_reason == "cancelled"
    assert list(stream) == []


def test_a_stream_gives_each_token_once_whatever_steps_raise(monkeypatch):
    engine = make_engine()
    options = {"max_new_tokens": 12, "stop_token_ids": ()}
    (wanted,) = run_to_end(engine, engine.submit([3, 1, 4], **options))
    run, steps = engine.loop.runner.run, iter(range(1000))

    def fail(*arguments):
        read = run(*arguments)
        if next(steps) % 3 == 2:  # of two that a call launches, after one that raised, neither
            raise KeyboardInterrupt
        return read

    monkeypatch.setattr(engine.loop.runner, "run", fail)
    stream, tokens = engine.stream(engine.submit([3, 1, 4], **options)), []
    while len(tokens) < 12:
        with contextlib.suppress(KeyboardInterrupt):
            tokens.append(next(stream).token_id)
    assert tokens == wanted.token_ids
    assert engine.metrics.generated_tokens == 24
    assert list(stream) == []
