"""An engine on a device that only takes time: real queue, scheduler and loop, and a clock of ours.

A launch takes what an H200 was measured to take for V4-Flash with 192 experts, of which each token
picks six at random. Calls run in order, one after the other, while the host goes on; reading one
waits for its end.
"""

import collections
import dataclasses

import numpy as np

import dsv4_jax as ds
from dsv4_jax.serving.schedule.step_times import StepTimes
from dsv4_jax.step.draft_worth import StepCost
from dsv4_jax.step.serve_values import ServeOutput
from helpers.serving import one_layer

DECODING_MS = {1: 5.0, 8: 11.2, 32: 23.5, 64: 29.9, 256: 44.5}
"""Rows of a step that only decodes, and what it takes: docs/benchmarks/serving.md. Of 256 it is
that of a call with prompts."""

PROMPT_MS = {256: 44.5, 1024: 82.9, 1536: 106.4, 2048: 133, 8192: 414, 16_384: 817, 32_768: 1481}
"""Tokens of a call, and what it takes: docs/benchmarks/serving.md, beyond 8,192 prefill.md."""

SPARED_MS = 0.0138
"""What a row of a call takes less if it holds no token, by arithmetic: it picks no experts."""

REACH_MS = 2.1e-7
"""What a token takes for each token before its call: a prompt of 32,768 tokens in four calls takes
165 ms more than four of 8,192."""

WAVE = 512
"""Tokens. A call of a size between two multiples of it takes about as long as one of the larger."""

HOST_MS = 1.5
"""What the host takes to plan and launch a step."""


FLASH = StepCost(fixed=7.755e9, experts=110.4e9, num_experts=192, picks=6, num_layers=43)
"""V4-Flash with 192 experts in the formats of the release, as `StepCost.of` has it."""


class Clock:
    """Seconds; they pass where something is simulated to take time."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def h200_ms(size, counts, lengths, *, is_plain):
    """What a call takes.

    Args:
      size: tokens of its shape.
      counts: i64[NS], tokens of each slot.
      lengths: i32[NS], tokens that each slot holds before it.
      is_plain: it only decodes.
    """
    if is_plain or size < min(PROMPT_MS):
        rows = np.count_nonzero(counts) if is_plain else size
        base = np.interp(rows, list(DECODING_MS), list(DECODING_MS.values()))
    else:
        rows = size if size <= WAVE else -(-size // WAVE) * WAVE
        base = np.interp(rows, list(PROMPT_MS), list(PROMPT_MS.values()))
        base -= SPARED_MS * (size - counts.sum())
    return float(base + REACH_MS * (counts @ lengths))


class SimulatedArrays:
    """In the place of `EngineArrays`: draws token 7 for every row when the time has passed."""

    def __init__(self, engine, clock, call_ms):
        devices = engine.loop.runner.devices
        self.cache, self.store = devices.cache, devices.store
        self.calls = []  # (size, is_plain, ms) of each
        self._clock, self._call_ms = clock, call_ms
        self._lengths = np.zeros(len(devices.cache.length_tokens), np.int64)
        self._free_s = 0.0
        self._outputs = collections.deque(maxlen=2)

    def launch(self, step_input, snapshots, num_checked, *_, is_plain, **__):
        self._clock.now += HOST_MS / 1e3
        rows, slots = step_input.request_ids, len(self._lengths)
        counts = np.bincount(rows[rows >= 0], minlength=slots)
        ms = self._call_ms(len(rows), counts, self._lengths, is_plain=is_plain)
        self.calls.append((len(rows), is_plain, ms))
        self._free_s = max(self._free_s, self._clock.now) + ms / 1e3
        self._lengths += counts
        columns = np.stack([np.where(counts > 0, 7, -1), counts, np.zeros(slots)], axis=1)
        output = ServeOutput(columns=columns.astype(np.int32), logprobs=None, draft_tokens=0)
        self._outputs.append((output, self._free_s))

    def launch_draw(self, *, is_simple, wants_logprobs):
        """Its time is in that of the step."""

    def is_ready(self, back):
        _, end_s = self._outputs[-1 - back]
        return self._clock.now >= end_s

    def read(self, back):
        output, end_s = self._outputs[-1 - back]
        self._clock.now = max(self._clock.now, end_s)
        return output

    def change(self, changes, moves):
        """Requests that are admitted begin at the length that their prefix hit has."""
        for slot, length in zip(changes.slots, changes.length_tokens, strict=True):
            if slot >= 0 and length >= 0:
                self._lengths[slot] = length

    def set_sampling(self, *_):
        pass

    set_counts = set_masks = save = rebuild = set_sampling


def simulated_engine(call_ms=h200_ms, cost=FLASH, **options):
    """An engine, its clock, and its device.

    Args:
      call_ms: what a call takes; `h200_ms` says of what.
      cost: what arithmetic knows of the model; None is another model, that of the engine itself.
      **options: of the engine.
    """
    engine, clock = ds.Engine(*one_layer(), **options), Clock()
    engine.loop.clock = engine.loop.queue.clock = clock
    if cost is not None:
        engine.loop.pace.times = StepTimes(cost)
    arrays = SimulatedArrays(engine, clock, call_ms)
    engine.loop.runner.devices = arrays
    return engine, clock, arrays


@dataclasses.dataclass
class Times:
    """What requests saw, in seconds.

    Attributes:
      seconds: of the whole run.
      first: f64[n], of each request in the order of arrival, from that to its first token.
      gaps: f64[m], between the tokens of one request after that.
      prompt_tokens: of all requests.
      drawn_tokens: the same.
    """

    seconds: float
    first: np.ndarray
    gaps: np.ndarray
    prompt_tokens: int
    drawn_tokens: int

    def gap_ms(self, share):
        return 1e3 * float(np.quantile(self.gaps, share))

    def first_s(self, share):
        return float(np.quantile(self.first, share))


def serve(engine, clock, requests, *, arrivals_s=None, concurrent=None, seed=0):
    """Serves requests to their ends.

    Args:
      engine: of `simulated_engine`.
      clock: its clock.
      requests: (tokens of the prompt, tokens to draw) of each; no two prompts begin alike.
      arrivals_s: when each comes, ascending; None is as soon as there are fewer than `concurrent`.
      concurrent: see there.
      seed: of the prompts.
    """
    rng, began_s = np.random.default_rng(seed), clock.now
    vocab, of = engine.config.vocab_size, {}
    came, first, gaps, last = [], np.full(len(requests), np.nan), [], {}
    while True:
        while len(came) < len(requests):
            number = len(came)
            if arrivals_s is None:
                if engine.num_unfinished >= concurrent:
                    break
                came.append(clock.now)
            else:
                if not engine.num_unfinished:
                    clock.now = max(clock.now, began_s + arrivals_s[number])
                if began_s + arrivals_s[number] > clock.now:
                    break
                came.append(began_s + arrivals_s[number])
            length, drawn = requests[number]
            tokens = rng.integers(0, vocab, length)
            tokens[: min(3, length - 1)] = np.unravel_index(number, (vocab,) * 3)[: length - 1]
            of[engine.submit(tokens, max_new_tokens=drawn, stop_token_ids=())] = number
        if not engine.num_unfinished:
            break
        for token in engine.step():
            number = of[token.request_id]
            if number in last:
                gaps.append(clock.now - last[number])
            else:
                first[number] = clock.now - came[number]
            last[number] = clock.now
            if token.finish_reason:
                engine.completion(token.request_id)
    assert not np.isnan(first).any()
    return Times(
        clock.now - began_s,
        first,
        np.array(gaps),
        sum(length for length, _ in requests),
        sum(drawn for _, drawn in requests),
    )
