"""What decoding costs under an idea: time of a step, and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.bench.timing import dispatch
from dsv4_jax.cache.empty_cache import init_cache
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.decode import jit_decode_loop
from dsv4_jax.step.prefill import jit_prefill
from dsv4_jax.step.sampling import make_sampling

_CHUNK = 128
"""Tokens of a call that fills the cache."""


class DecodeCost(NamedTuple):
    """What a decode step costs.

    Attributes:
      step_ms: milliseconds of a step, one per measurement.
      cache_bytes: bytes of the cache, of all requests at their longest context.
      workspace_bytes: bytes that the step needs beside its arguments and results.
    """

    step_ms: tuple[float, ...]
    cache_bytes: int
    workspace_bytes: int


def time_decode(
    params: DSV4Params,
    token_ids: np.ndarray,
    *,
    config: DSV4Config,
    max_requests: int = 1,
    num_steps: int = 16,
    repeats: int = 7,
) -> DecodeCost:
    """Times greedy decode steps, whose tokens stay on the device, at one context again and again.

    Args:
      params: model parameters.
      token_ids: i32[T], what every request holds before the steps; at least 1 token.
      config: the model, with an idea or without; the cache has the idea's format or the default.
      max_requests: B, requests that decode at once.
      num_steps: steps of a measurement, in one call.
      repeats: measurements, after one that does not count.

    Raises:
      ValueError: an argument has another type or shape, or is out of range.
    """
    repeats = checks.integer("repeats", repeats, 1)
    timer = DecodeTimer(
        params, token_ids, config=config, max_requests=max_requests, num_steps=num_steps
    )
    timer.measure_ms()
    return timer.cost(timer.measure_ms() for _ in range(repeats))


class DecodeTimer:
    """What `time_decode` does, a measurement at a time, so that several can be made in turns.

    A machine that grows slower or faster meanwhile then changes all of them alike.
    """

    def __init__(
        self,
        params: DSV4Params,
        token_ids: np.ndarray,
        *,
        config: DSV4Config,
        max_requests: int = 1,
        num_steps: int = 16,
    ) -> None:
        """Fills a cache and compiles the steps; arguments and errors as of `time_decode`."""
        checks.array("token_ids", token_ids, (None,), "iu")
        max_requests = checks.integer("max_requests", max_requests, 1)
        self._num_steps = num_steps = checks.integer("num_steps", num_steps, 1)
        length = checks.integer("len(token_ids)", len(token_ids), 1)
        cache = init_cache(config, max_requests=max_requests, max_context_tokens=length + num_steps)
        for slot in range(max_requests):
            for start in range(0, length, _CHUNK):
                call = _call(token_ids[start : start + _CHUNK], slot, max_requests)
                cache, _ = jit_prefill(params, cache, call, config=config)
        slots = jnp.arange(max_requests, dtype=jnp.int32)
        last = jnp.full(max_requests, token_ids[-1], jnp.int32)
        step_input = StepInput(token_ids=last, request_ids=slots, request_slots=slots)
        sampling = make_sampling(max_requests)
        loop = jit_decode_loop.lower(
            params, cache, step_input, sampling, num_steps=num_steps, config=config
        ).compile()
        self._cache, self._memory = cache, loop.memory_analysis()
        self._lengths = jnp.full(max_requests, length, jnp.int32)
        self._decode = lambda cache: loop(params, cache, step_input, sampling)[0]

    def measure_ms(self) -> float:
        """Milliseconds of a step; the first call does not count."""
        cache = dataclasses.replace(self._cache, length_tokens=jnp.copy(self._lengths))
        seconds, self._cache = dispatch(self._decode, cache, 1)
        return 1e3 * seconds / self._num_steps

    def cost(self, step_ms: Iterable[float]) -> DecodeCost:
        """What steps that were measured cost."""
        times = tuple(step_ms)
        workspace = 0 if self._memory is None else int(self._memory.temp_size_in_bytes)
        return DecodeCost(times, self._cache.memory_bytes(), workspace)


def _call(token_ids: np.ndarray, slot: int, num_rows: int) -> StepInput:
    """Up to `_CHUNK` tokens of one slot, with padding."""
    ids, rows = np.zeros(_CHUNK, np.int32), np.full(_CHUNK, -1, np.int32)
    ids[: len(token_ids)], rows[: len(token_ids)] = token_ids, slot
    return StepInput(
        token_ids=jnp.asarray(ids),
        request_ids=jnp.asarray(rows),
        request_slots=jnp.arange(num_rows, dtype=jnp.int32),
    )
