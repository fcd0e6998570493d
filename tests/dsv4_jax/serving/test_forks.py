"""What a fork has: with what its caller had got of the first request, its stream is its answer.

Every order of a few calls is tried before a fork, with and without a step in flight.
"""

import functools
import itertools

import pytest

import dsv4_jax as ds
from helpers import serving

WANTED = {"max_new_tokens": 7, "stop_token_ids": (), "temperature": 1.0}
STEPPED = ("step", "verify", "preempt")
STREAMED = ("next", "other", "verify")
MIXED = ("step", "next", "other", "cache", "generate")


@functools.cache
def engine_of(**changes):
    sizes = {"draft_tokens": 0, "decode_tokens": None, "cache_format": "f32"}
    return ds.Engine(*serving.one_layer(), **(serving.SIZES | sizes | changes))


class Caller:
    """Makes calls by name, and keeps what each gave."""

    def __init__(self, engine):
        self.engine = engine
        self.first = engine.submit([3, 1, 4, 1, 5], seed=1, **WANTED)
        self.second = engine.submit([2, 7, 1], seed=2, **WANTED)
        self.streams = {}
        self.returned: dict[int, list[int]] = {}
        self.given: list[int] = []
        self.got: set[int] = set()  # numbers of the first one's tokens

    def call(self, name):
        engine, request = self.engine, self.engine.requests[self.first]
        if name == "step":
            tokens = engine.step()
            for token in tokens:
                self.returned.setdefault(token.request_id, []).append(token.token_id)
            count = sum(token.request_id == self.first for token in tokens)
            self.got |= set(range(request.num_drawn - count, request.num_drawn))
        elif name == "next":
            token = next(self.stream(self.first), None)
            if token is not None:
                self.got.add(len(self.given))
                self.given.append(token.token_id)
        elif name == "other":
            next(self.stream(self.second), None)
        elif name == "generate":
            engine.generate([[5]], max_new_tokens=1, stop_token_ids=())
        elif name == "verify":
            assert not engine.verify().problems
        elif name == "cache":
            assert engine.cache.length_tokens.shape
            serving.drain(engine)
        else:
            engine.preempt(self.first)

    def stream(self, request_id):
        """One stream of each request."""
        if request_id not in self.streams:
            self.streams[request_id] = self.engine.stream(request_id)
        return self.streams[request_id]

    def end(self, *request_ids):
        """Their answers; nothing is left in the engine."""
        engine = self.engine
        while engine.num_unfinished:
            self.call("step")
        assert not engine.verify().problems
        done = [engine.completion(one).token_ids for one in request_ids]
        engine.requests.clear()
        assert engine.metrics.used_blocks == 0
        return done


def orders(names, length):
    return itertools.chain(*(itertools.product(names, repeat=n) for n in range(length + 1)))


def unfinished(caller):
    return caller.engine.requests[caller.first].finish_reason is None


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_steps_give_all_of_a_fork(overlap):
    """What they had given of the first one, and then of the fork."""
    engine = engine_of(overlap=overlap)
    for order in orders(STEPPED, 3):
        caller = Caller(engine)
        for name in ("step", *order):
            caller.call(name)
        before = list(caller.returned[caller.first])
        fork = engine.fork(caller.first, seed=5)
        caller.call(order[0] if order else "verify")
        first, second = caller.end(caller.first, fork)
        assert caller.returned[caller.first] == first, order
        assert before + caller.returned[fork] == second, order
        assert first != second


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"overlap": False}, {"steps_per_call": 2}])
def test_streams_give_all_of_a_fork(changes):
    """Streams of others step the engine too, and looks read what they drew."""
    engine = engine_of(**changes)
    for order in orders(STREAMED, 3):
        caller = Caller(engine)
        for name in ("next", *order):
            caller.call(name)
        if not unfinished(caller):
            caller.end()
            continue
        before = list(caller.given)
        fork = engine.fork(caller.first, seed=5)
        again = engine.fork(fork, seed=6)
        rest = [[one.token_id for one in engine.stream(i)] for i in (fork, again, caller.first)]
        done = caller.end(fork, again, caller.first)
        assert done[0] == before + rest[0], order
        assert done[1] == before + rest[1], order
        assert done[2][: len(before)] == before
        assert done[2][-len(rest[2]) :] == rest[2]
        assert len({tuple(one) for one in done}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 3])
def test_steps_and_streams_together_leave_no_token_out(most):
    engine = engine_of()
    for order in orders(MIXED, most):
        caller = Caller(engine)
        for name in order:
            caller.call(name)
        if unfinished(caller):
            got = caller.got
            fork = engine.fork(caller.first, seed=5)
            rest = [one.token_id for one in engine.stream(fork)]
            (done,) = caller.end(fork)
            start = len(done) - len(rest)
            assert done[start:] == rest
            assert got >= set(range(start)), order
            assert start >= len(caller.given), order
        else:
            caller.end()


@pytest.mark.slow
@pytest.mark.parametrize("look", ["verify", "cache"])
@pytest.mark.parametrize("num_calls", [2, 3])
def test_looking_changes_nothing(look, num_calls):
    """Between any two calls; ends, forks, cancels and preemptions give what they give without."""
    engine = serving.limit(engine_of.__wrapped__(), num_snapshots=0)
    for calls in itertools.product(("step", "fork", "cancel", "preempt"), repeat=num_calls):
        seen = []
        for looks in (False, True):
            caller, ids = Caller(engine), []
            log = []
            for name in ("step", *calls, "step"):
                if looks:
                    caller.call(look)
                if name == "fork" and unfinished(caller):
                    ids.append(engine.fork(caller.first, seed=5))
                elif name == "cancel":
                    log.append(engine.cancel(caller.first))
                elif name in ("step", "preempt"):
                    caller.call(name)
                log.append(sorted(caller.returned.values()))
                log.append(engine.num_unfinished)
            log += caller.end(caller.first, caller.second, *ids)
            seen.append(log)
        assert seen[0] == seen[1], calls


@pytest.mark.slow
def test_drafts_kept_by_a_step_in_flight_are_not_the_forks():
    """As the first one's last tokens may be several at once."""
    engine = engine_of(draft_tokens=3, decode_tokens=serving.BUCKET)
    for order in itertools.product(("step", "verify"), repeat=3):
        caller = Caller(engine)
        for name in ("step", *order, "verify"):
            caller.call(name)
        before = list(caller.returned[caller.first])
        fork = engine.fork(caller.first, seed=1)
        first, second = caller.end(caller.first, fork)
        assert first == second
        assert before + caller.returned[fork] == second, order
