"""Times work on a device: dispatched in a row and waited for once."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_COPY_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, of several measurements.

    Attributes:
      median_s: the middle one.
      least_s: the smallest.
      most_s: the largest.
      calls: how many calls each measurement is the mean of.
    """

    median_s: float
    least_s: float
    most_s: float
    calls: int


def time_calls(
    call: Callable[[Any], Any],
    state: Any,
    *,
    rewind: Callable[[Any], Any] = lambda state: state,
    max_calls: int = 64,
    least_s: float = 0.15,
    repeats: int = 7,
    limit_s: float = math.inf,
) -> tuple[Timing, Any]:
    """Times `state = call(state)`.

    Each measurement dispatches calls one after the other and waits for the last; as many as take
    `least_s`, so that waiting, some 50 us, does not count.

    Args:
      call: what is timed, compiled already; it may donate its argument.
      state: what the first call takes.
      rewind: makes the state that a measurement begins with from the one that the last left.
      max_calls: the most calls of a measurement, and the calls that `rewind` must leave room for.
      least_s: seconds that a measurement should take.
      repeats: measurements.
      limit_s: no measurement begins later than this after the first.

    Returns:
      The timing, and the state that the last call left.
    """

    def measure(state: Any, calls: int) -> tuple[float, Any]:
        state = jax.block_until_ready(rewind(state))
        start = time.perf_counter()
        for _ in range(calls):
            state = call(state)
        jax.block_until_ready(state)
        return time.perf_counter() - start, state

    _, state = measure(state, 1)  # graphs and libraries are set up here
    once, state = measure(state, 2)
    calls = min(max_calls, max(2, math.ceil(least_s / (once / 2))))
    begun, samples = time.perf_counter(), []
    while len(samples) < repeats and (not samples or time.perf_counter() - begun < limit_s):
        seconds, state = measure(state, calls)
        samples.append(seconds / calls)
    return Timing(statistics.median(samples), min(samples), max(samples), calls), state


def copy_bandwidth(repeats: int = 7) -> float:
    """Bytes per second of one kernel that reads and writes 512 MiB each, in place."""
    flip = jax.jit(lambda x: x ^ jnp.uint32(1), donate_argnums=0)
    array = jnp.zeros(_COPY_BYTES // 4, jnp.uint32)
    timing, _ = time_calls(flip, array, repeats=repeats, least_s=0.05, max_calls=256)
    return 2 * _COPY_BYTES / timing.median_s
