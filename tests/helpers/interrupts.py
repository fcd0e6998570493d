"""A short scripted life of an engine, and interrupts at chosen lines of it.

What a request gets does not depend on when the others are served, so that the life gives the same
answers whatever interrupts it, as long as each call either does all or nothing.
"""

import contextlib
import dataclasses
import linecache
import math
import pathlib
import signal
import sys
import time
from typing import NamedTuple

import numpy as np

import dsv4_jax
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.serving import limit, make_engine, prompt

PACKAGE = pathlib.Path(dsv4_jax.__file__).parent
CALLS = PACKAGE / "serving/requests/calls.py"
SOURCES = {
    str(path) for room in ("serving", "allocator") for path in PACKAGE.glob(f"{room}/**/*.py")
}
"""Files whose lines are interrupted."""


class Line(NamedTuple):
    """A line of a function."""

    file: str
    function: str
    number: int


class Interrupt(KeyboardInterrupt):
    """What a line raises."""


class Failure(Exception):
    """The same as an error that code may catch, such as a signal handler's."""


class Lines:
    """Counts the lines that run while it traces, and raises once at each that is chosen.

    After an error it raises no other until a step has gone well: two in a row are taken for a
    request's own, and the engine looks for whose.

    Attributes:
      counts: by `Line`, how often it ran.
      raised: the lines at which it raised, in order.
    """

    def __init__(self, chosen=None, error=Interrupt):
        """Raises at {line: which time it runs at the earliest}."""
        self.counts = {}
        self.raised = []
        self._chosen = dict(chosen or {})
        self._error = error
        self._may_raise = True

    @contextlib.contextmanager
    def tracing(self, name):
        """One call, of a method of that name."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
            self._may_raise |= name == "step"
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, argument):
        return self._at if frame.f_code.co_filename in SOURCES else None

    def _at(self, frame, event, argument):
        if event == "line":
            code = frame.f_code
            line = Line(pathlib.Path(code.co_filename).name, code.co_qualname, frame.f_lineno)
            self.counts[line] = self.counts.get(line, 0) + 1
            is_due = self.counts[line] >= self._chosen.get(line, math.inf)
            if is_due and self._may_raise and may_raise(line, self.counts[line]):
                del self._chosen[line]
                self.raised.append(line)
                self._may_raise = self._error is Interrupt
                raise self._error(*line)
        return self._at


class Signals:
    """Raises in calls by a timer, at times that fit how long a call of that kind takes.

    Attributes:
      raised: number of signals so far.
    """

    def __init__(self, rng, wanted):
        """Raises `wanted` times."""
        self.raised = 0
        self._rng = rng
        self._wanted = wanted
        self._seconds = {}

    def _on_signal(self, number, frame):
        self.raised += 1
        raise Interrupt

    @contextlib.contextmanager
    def tracing(self, name):
        """One timer a call, in half of the calls."""
        before = signal.signal(signal.SIGALRM, self._on_signal)
        started, usual = time.perf_counter(), self._seconds.get(name, 1e-3)
        try:
            if self.raised < self._wanted and self._rng.random() < 0.5:
                signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(1e-6, 1.1 * usual))
            yield
            self._seconds[name] = 0.9 * usual + 0.1 * (time.perf_counter() - started)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def may_raise(line, count):
    """Whether an interrupt can come there.

    A trace function is called on the way out of `with` too, where the interpreter looks for no
    signal: a lock is given back as soon as the block has ended.
    """
    is_with = line.file == CALLS.name and linecache.getline(str(CALLS), line.number).strip()
    return count == 1 or not (is_with and is_with.startswith("with self.call_lock.lock"))


def scarce_engine():
    """Few blocks and snapshots, so that blocks are evicted and requests give way."""
    tokenizer = load_tokenizer(dsv4_jax.SHIPPED_CHECKPOINT)
    return limit(make_engine(tokenizer=tokenizer, grammars=False), num_blocks=6, num_snapshots=3)


def truth(engine):
    """What the engine knows of requests, and its metrics but those of who runs in which blocks."""
    metrics = dataclasses.asdict(engine.metrics)
    gauges = engine.metrics.gauges
    metrics["unfinished"] = gauges.running + gauges.waiting
    requests = {
        i: (one.known.tolist(), one.finish_reason, one.num_given)
        for i, one in engine.requests.items()
    }
    return metrics, requests, engine.next_id


class Life:
    """Submits, streams, forks, cancels, preempts, verifies and takes, one call at a time.

    Attributes:
      engine: the engine.
      answers: by name, the tokens and finish reason that a request got, in the order of the life.
      num_interrupts: calls that raised.
      num_late: those of them that had ended, and whose result was lost.
    """

    def __init__(self, engine, interrupts):
        """A life in which calls may raise.

        Args:
          engine: without requests.
          interrupts: what raises, `Lines` or `Signals`.
        """
        self.engine = engine
        self.answers = {}
        self.num_interrupts = 0
        self.num_late = 0
        self._interrupts = interrupts
        self._salt = str(engine.next_id)  # lives of one engine share no prefixes

    def call(self, name, *arguments, before=lambda: None, **options):
        """Calls a method until it does not raise; `before` comes before each try."""
        method = getattr(self.engine, name)
        while True:
            before()
            found, result = self.attempt(name, lambda: method(*arguments, **options))
            if found:
                return result
            if self.was_late:
                if name in ("submit", "fork"):
                    return self.engine.next_id - 1
                if name == "completion":
                    return self.completed
                return True

    def attempt(self, name, call):
        """Whether a call ended, and what it gave; one that raised did nothing, or all of it."""
        engine, self.was_late = self.engine, False
        known, unfinished = truth(engine), engine.num_unfinished
        try:
            with self._interrupts.tracing(name):
                return True, call()
        except (Interrupt, Failure):
            self.num_interrupts += 1
        unfinished_now = engine.num_unfinished
        engine.undo.roll_back()  # if it was interrupted itself
        if name == "next":  # a stream may have done some steps before the one that raised
            return False, None
        if engine.undo.stands:
            assert unfinished_now == unfinished
        if truth(engine) != known:
            # The call had ended, and the signal came before its caller had the result.
            assert isinstance(self._interrupts, Signals), self._interrupts.raised[-1]
            assert not engine.undo.stands
            self.num_late, self.was_late = self.num_late + 1, True
        return False, None

    def submit(self, text, **options):
        options = {"max_new_tokens": 6, "stop_token_ids": (), "salt": self._salt} | options
        return self.call("submit", text, **options)

    def drawn(self, request_id):
        return self.engine.requests[request_id].num_drawn

    def running(self, request_id, num_drawn=0):
        """Steps until a request runs and has drawn so many tokens."""
        for _ in range(3000):
            if self.engine.requests[request_id].finish_reason is not None:
                return
            if (
                self.engine.num_unfinished
                and self.engine.requests[request_id].slot >= 0
                and self.drawn(request_id) >= num_drawn
            ):
                return
            self.call("step")
        raise AssertionError("the engine does not go on")

    def take(self, name, request_id):
        for _ in range(3000):
            if self.engine.requests[request_id].finish_reason is not None:
                break
            self.call("step")
        self.completed = self.engine.requests[request_id].completion(self.engine.tokenizer)
        done = self.call("completion", request_id)
        self.answers[name] = (done.token_ids, done.finish_reason)

    def run(self):
        rng = np.random.default_rng(5)
        stem = prompt(rng, 130)
        cold = self.submit(stem, max_new_tokens=4, speculate=False)
        waits = self.submit(prompt(rng, 9))
        self.call("cancel", waits)
        self.take("waits", waits)
        text = self.submit(prompt(rng, 5), max_new_tokens=12, stop_texts=("no such text",))
        self.running(cold, 3)
        # A greedy fork gets the rest of its parent, wherever it starts.
        fork = self.call("fork", cold, seed=2, before=lambda: self.running(cold, 3))
        hit = self.submit([*stem, 1, 2], max_new_tokens=5, temperature=1.0, seed=3)
        self.call("preempt", hit, before=lambda: self.running(hit))
        self.take("cold", cold)
        self.take("fork", fork)
        self.take("hit", hit)
        cut = self.submit(prompt(rng, 30))
        self.call("cancel", cut, before=lambda: self.running(cut))
        self.call("verify")
        self.take("text", text)
        # Three that outgrow their blocks together: one gives way, and what is cached is evicted.
        grown = [self.submit(prompt(rng, 250 + n), max_new_tokens=8) for n in range(3)]
        stream = self.engine.stream(grown[0])
        self.answers["stream"] = list(self.tokens(stream))
        for number, request_id in enumerate(grown):
            self.take(f"grown {number}", request_id)
        self.answers["cut"] = self.engine.requests[cut].known.tolist()[:30]
        self.take("cut drawn", cut)
        self.answers.pop("cut drawn")
        self.check()
        return self.answers

    def tokens(self, stream):
        ended = object()
        (request,) = stream._requests
        while True:
            given = request.num_given
            found, token = self.attempt("next", lambda: next(stream, ended))
            if token is ended:
                return
            if found or request.num_given > given:
                assert request.num_given == given + 1
                self.num_late += not found
                yield request.token(given).token_id

    def check(self):
        """Nothing is wrong, held or counted wrong, and no request is left."""
        engine, metrics = self.engine, self.engine.metrics
        report = engine.verify()
        assert not report.problems, str(report)
        assert not engine.requests
        assert engine.num_unfinished == metrics.running == metrics.waiting == 0
        assert metrics.submitted == sum(metrics.finished.values()) == engine.next_id
        assert metrics.used_blocks == 0
        manager = engine.loop.shards.managers[0]
        assert manager.num_free_slots == len(manager.length_tokens)
        assert manager.num_free_blocks == manager.num_blocks
        tree = manager.prefixes.tree
        assert len(tree._free_snapshots) + len(tree._snapshots) == tree.num_snapshots
