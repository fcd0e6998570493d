"""Random lives of an engine, and what each of its requests should get."""

import functools

import numpy as np

from dsv4_jax.serving.requests.cached_request import CachedRequest
from helpers.schedules import assert_same_bytes
from helpers.serving import drain, limit, make_engine, prompt, rows_at, rows_of, run_to_end

SETTINGS = {
    1: {"logit_bias": {5: 4.0, 60: 3.0, 7: -100}, "min_p": 0.01},
    2: {"logprobs": 4},
    3: {"presence_penalty": 1.0, "frequency_penalty": 0.7, "logprobs": 0},
}
"""How some requests draw, by their seed's remainder of 5."""


@functools.cache
def plain_engine():
    """Without sharing, speculation or company."""
    return limit(make_engine(overlap=False), num_snapshots=0)


def alone(text, options, engine=None):
    """The completion of a request by itself, without drafts."""
    engine = engine or plain_engine()
    return run_to_end(engine, engine.submit(text, **(options | {"speculate": False})))[0]


def rows_alone(text, drawn, length, options, engine=None):
    """What a request by itself could read once it holds `length` tokens."""
    engine = engine or plain_engine()
    request = engine.submit(text, **(options | {"speculate": False}))
    rows = rows_at(engine, request, length)
    assert rows["length"] == length
    assert engine.requests[request].known.tolist()[:length] == [*text, *drawn][:length]
    engine.cancel(request)
    return rows


class Life:
    """An engine, and what each of its requests should get: what `plain` gives it alone."""

    def __init__(self, engine, seed, plain=None):
        self.engine = engine
        self.plain = plain or plain_engine()
        self.rng = np.random.default_rng(seed)
        self.stem = prompt(self.rng, 400)
        self.texts: dict[int, tuple[list[int], dict]] = {}
        self.cancelled: set[int] = set()
        self.counts = dict.fromkeys(
            ("submit", "step", "cancel", "preempt", "fork", "look", "done"), 0
        )

    def check_rows(self, rows, wanted):
        """What a request can read is what it could read alone."""
        assert_same_bytes(rows, wanted)

    def check_logprobs(self, logprobs, wanted):
        """So are the log-probabilities that it got."""
        assert logprobs == wanted

    def unfinished(self):
        return [i for i in self.texts if self.engine.requests[i].finish_reason is None]

    def submit(self):
        rng = self.rng
        text = self.stem[: int(rng.integers(1, 400))] if rng.random() < 0.7 else []
        text = text + prompt(rng, int(rng.integers(1, 60)))
        options = {
            "max_new_tokens": int(rng.integers(1, 40)), "temperature": float(rng.integers(0, 2)),
            "seed": int(rng.integers(0, 100)), "stop_token_ids": (int(rng.integers(0, 96)),),
            "speculate": bool(rng.random() < 0.7),
        }  # fmt: skip
        options |= SETTINGS.get(options["seed"] % 5, {})
        self.texts[self.engine.submit(text, **options)] = (text, options)

    def fork(self, request_id):
        """The branch is a request of its own, whose prompt is what had been drawn.

        That is no penalised one's equal, for a prompt does not count; False then.
        """
        request = self.engine.requests[request_id]
        known, left = request.known.tolist(), request.num_wanted
        text, options = self.texts[request_id]
        if "presence_penalty" in options:
            return False
        seed = int(self.rng.integers(0, 100))
        new = self.engine.fork(request_id, seed=seed)
        self.texts[new] = (known, options | {"seed": seed, "max_new_tokens": left})
        assert text == known[: len(text)]
        return True

    def move(self, target):
        """A request goes to a life, this one or another, as bytes; here it is mostly cancelled.

        Whether it had something in the cache.
        """
        unfinished = self.unfinished()
        if not unfinished:
            return False
        request_id = unfinished[self.rng.integers(0, len(unfinished))]
        cached = CachedRequest.from_bytes(self.engine.snapshot(request_id).to_bytes())
        if self.rng.random() < 0.8:
            self.engine.cancel(request_id)
            self.cancelled.add(request_id)
        target.texts[target.engine.restore(cached)] = self.texts[request_id]
        return cached.rows is not None

    def look(self, request_id):
        """Every byte that a running request could read."""
        drain(self.engine)
        request = self.engine.requests[request_id]
        text, options = self.texts[request_id]
        if request.slot < 0 or not request.num_drawn:
            return False
        rows = rows_of(self.engine, request_id)
        length = int(rows["length"])
        if length < len(text):
            return False
        if length > len(request.known):  # drafts were kept, which the next step hands out
            return False
        drawn = request.known.tolist()[len(text) :]
        self.check_rows(rows, rows_alone(text, drawn, length, options, self.plain))
        return True

    def event(self):
        unfinished, draw = self.unfinished(), self.rng.random()
        kind = "step"
        if not unfinished or (draw < 0.12 and len(unfinished) < 9):
            self.submit()
            kind = "submit"
        elif draw < 0.22:
            request_id = unfinished[self.rng.integers(0, len(unfinished))]
            kind = ("cancel", "preempt", "fork", "look")[self.rng.integers(0, 4)]
            if kind == "cancel":
                assert self.engine.cancel(request_id)
                self.cancelled.add(request_id)
            elif not {"preempt": self.engine.preempt, "fork": self.fork, "look": self.look}[kind](
                request_id
            ):
                return
        else:
            self.engine.step()
        self.counts[kind] += 1

    def finish(self):
        self.finish_requests()
        assert not self.engine.verify().problems
        metrics = self.engine.metrics
        assert (metrics.running, metrics.waiting, metrics.used_blocks) == (0, 0, 0)

    def finish_requests(self):
        """All end, and have got what they get alone."""
        while self.engine.num_unfinished:
            self.engine.step()
        for request_id, (text, options) in self.texts.items():
            request = self.engine.requests[request_id]
            start = len(text) - request.prompt_tokens  # what a fork had already
            got = self.engine.completion(request_id)
            want = alone(text, options, self.plain)
            if want.logprobs is not None:
                num_drawn = len(got.token_ids) - start
                self.check_logprobs(got.logprobs[start:], want.logprobs[:num_drawn])
            if request_id in self.cancelled:
                assert got.finish_reason == "cancelled"
                assert got.token_ids[start:] == want.token_ids[: len(got.token_ids) - start]
            else:
                assert got.token_ids[start:] == want.token_ids
                assert got.finish_reason == want.finish_reason
                self.counts["done"] += 1
