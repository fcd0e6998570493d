"""Times calls from the host: dispatched one after the other, and waited for once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.hosts import agree

_COPY_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, over several measurements.

    Attributes:
      median_s: the median.
      least_s: the smallest.
      most_s: the largest.
      calls: number of calls that each measurement averages.
    """

    median_s: float
    least_s: float
    most_s: float
    calls: int

    def fields(self) -> dict[str, float]:
        """Fields of a part's row: milliseconds of a call, and calls of a measurement."""
        times = {"ms": self.median_s, "ms_least": self.least_s, "ms_most": self.most_s}
        return {key: seconds * 1e3 for key, seconds in times.items()} | {"calls": self.calls}

    def row(self, name: str, *, per_call: int = 1) -> dict[str, float]:
        """Fields of a row: milliseconds, of one of so many steps that a call makes, and calls."""
        fields = self.fields()
        return {
            f"{name}_{key}": value if key == "calls" else value / per_call
            for key, value in fields.items()
        }


def time_calls(
    call: Callable[[Any], Any],
    state: Any,
    *,
    rewind: Callable[[Any], Any] = lambda state: state,
    max_calls: int = 64,
    least_s: float = 0.15,
    repeats: int = 7,
    limit_s: float = math.inf,
    first_calls: int = 2,
) -> tuple[Timing, Any]:
    """Times `state = call(state)`, as one of many calls in a row.

    A measurement dispatches 2n calls and waits for them, less what n calls take, which is the
    median of as many measurements. Before the first call begins on the device the host has handed
    over its arguments, which in a loop it does while the device runs the call before. So a call
    counts as long as the device takes for it, or the host where that takes longer. On a CPU, whose
    host is the device, a measurement is n calls, and where `max_calls` is 1 it is one call, with
    all that precedes it. For calls shorter than their dispatch see `loops`. Several processes that
    run the same calls make as many as process 0 does.

    Args:
      call: a compiled function; it may donate its argument.
      state: the argument of the first call.
      rewind: makes the state that calls in a row start from, out of the last one's result.
      max_calls: limit on the calls in a row; `rewind` must leave room for that many.
      least_s: seconds that n calls should take.
      repeats: number of measurements.
      limit_s: no measurement starts later than this after the first.
      first_calls: calls before the first measurement, which set up libraries, and then graphs of
        arrays where they stay; 0 where the caller has made them.

    Returns:
      The timing, and the state after the last call.
    """
    for _ in range(first_calls):
        _, state = dispatch(call, rewind(state), 1)
    calls, has_host = 1, max_calls > 1 and jax.default_backend() != "cpu"
    if max_calls > 1:
        pair, state = dispatch(call, rewind(state), 2)
        most = max_calls // 2 if has_host else max_calls
        calls = agree(min(most, max(2, math.ceil(least_s / (pair / 2)))))

    def measure() -> tuple[float, float]:
        nonlocal state
        before = 0.0
        if has_host:
            before, state = dispatch(call, rewind(state), calls)
        total, state = dispatch(call, rewind(state), 2 * calls if has_host else calls)
        return before, total

    befores, totals = zip(*repeat(measure, most=repeats, limit_s=limit_s), strict=True)
    before = statistics.median(befores)
    samples = [(total - before) / calls for total in totals]
    return Timing(statistics.median(samples), min(samples), max(samples), calls), state


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as long calls of one program take as those of another.

    Attributes:
      median: the median over pairs of measurements.
      least: the smallest.
      most: the largest.
      pairs: how many there were.
    """

    median: float
    least: float
    most: float
    pairs: int


@dataclasses.dataclass
class Calls:
    """Calls `state = call(state)` of a program, and what they go on from.

    Attributes:
      call: a compiled function; it may donate its argument.
      state: the argument of the next call.
      rewind: makes the state that calls in a row start from, out of the last one's result.
      count: calls in a row for which `rewind` leaves room.
    """

    call: Callable[[Any], Any]
    state: Any
    rewind: Callable[[Any], Any]
    count: int

    def seconds(self) -> float:
        """Of one call, as `time_calls` measures it once."""
        has_host = self.count > 1 and jax.default_backend() != "cpu"
        calls, before = (self.count // 2 if has_host else self.count), 0.0
        if has_host:
            before, self.state = dispatch(self.call, self.rewind(self.state), calls)
        times = 2 * calls if has_host else calls
        total, self.state = dispatch(self.call, self.rewind(self.state), times)
        return (total - before) / calls


def time_ratio(ours: Calls, others: Calls, *, least_pairs: int = 3, limit_s: float = 2.0) -> Ratio:
    """Times two programs in turns, so that a clock that drifts concerns both alike.

    Args:
      ours: what is above the fraction line.
      others: what is below it.
      least_pairs: pairs of measurements that are made in any case.
      limit_s: no pair but those starts later than this after the first.
    """
    for each in (ours, others):  # sets up libraries, then graphs of arrays where they stay
        for _ in range(2):
            _, each.state = dispatch(each.call, each.rewind(each.state), 1)
    turns = itertools.cycle([(others, ours), (ours, others)])

    def measure() -> float:
        taken = {id(each): each.seconds() for each in next(turns)}
        return taken[id(ours)] / taken[id(others)]

    ratios = repeat(measure, least=least_pairs, limit_s=limit_s)
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def repeat[Found](
    measure: Callable[[], Found], *, least: int = 1, most: float = math.inf, limit_s: float
) -> list[Found]:
    """What measurements find, as many in every process that joined.

    Args:
      measure: makes one.
      least: how many there are in any case.
      most: how many there are at most.
      limit_s: none but the least starts later than this after the first.
    """
    begun, found = time.perf_counter(), []
    while len(found) < most and agree(len(found) < least or time.perf_counter() - begun < limit_s):
        found.append(measure())
    return found


def dispatch(call: Callable[[Any], Any], state: Any, times: int) -> tuple[float, Any]:
    """Calls `state = call(state)` so many times; returns seconds and last state.

    On a CPU each call is waited for: where several run on a mesh, one can wait for ever in the
    collectives of another.
    """
    state = jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(times):
        state = settled(call(state))
    jax.block_until_ready(state)
    return time.perf_counter() - start, state


def settled[T](state: T) -> T:
    """What a call gave, waited for on a CPU (`dispatch`)."""
    return jax.block_until_ready(state) if jax.default_backend() == "cpu" else state


def copy_bandwidth(repeats: int = 7) -> float:
    """Bytes per second of a kernel that reads 512 MiB and writes them in place, both counted."""
    flip = jax.jit(lambda x: x ^ jnp.uint32(1), donate_argnums=0)
    array = jnp.zeros(_COPY_BYTES // 4, jnp.uint32)
    timing, _ = time_calls(flip, array, repeats=repeats, least_s=0.05, max_calls=256)
    return 2 * _COPY_BYTES / timing.median_s
