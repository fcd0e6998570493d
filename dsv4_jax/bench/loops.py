"""Device time of one call that is too short for the host to time.

A loop on the device calls a function on several different inputs, many times. The time of a loop
twice as long, less that of the loop, is the time of the calls alone: the dispatch and Python drop
out. Inputs that together exceed the L2 cache are read from memory each time; `clear_l2` is for
smaller ones. `timing.time_calls` is for calls that take longer than their dispatch.
"""

from __future__ import annotations

import concurrent.futures
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.bench.timing import dispatch

_CLEARED_BYTES = 256 * 2**20
_LEAST_SECONDS = 0.01
_LEAST_LOOP_US = 2000.0
_LEAST_CALL_US = 2.0
"""With these, a loop takes the device longer than its dispatch takes the host."""


class Loops:
    """A function's loop and the one twice as long, compiled in other threads."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[tuple[Any, ...]],
        state: Any,
        *,
        rounds: int,
        pool: concurrent.futures.Executor,
    ) -> None:
        """Lowers both loops here and compiles them in the pool.

        Args:
          function: as for `median_us`.
          inputs: as for `median_us`, or `jax.ShapeDtypeStruct` in place of arrays.
          state: likewise.
          rounds: as for `median_us`.
          pool: the executor that compiles.
        """
        run = jax.jit(
            loop_over(function, has_state=state is not None),
            static_argnums=0,
            donate_argnums=1,
            compiler_options={"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"},
        )
        self._rounds = rounds
        self._compiled = {
            length: pool.submit(run.lower(length, state, inputs).compile)
            for length in (rounds, 2 * rounds)
        }

    def median_us(
        self, inputs: Sequence[tuple[Any, ...]], state: Any = None, *, repeats: int = 9
    ) -> float:
        """See the function of that name."""
        compiled = {length: future.result() for length, future in self._compiled.items()}
        carry: Any = (None, None if state is None else _copied(state), None)
        rounds = self._rounds

        def seconds(length: int, dispatches: int) -> float:
            nonlocal carry
            start, carry = (None, carry[1], None), None  # frees the last outputs
            taken, carry = dispatch(lambda c: compiled[length](c[1], inputs), start, dispatches)
            return taken

        once = math.nan
        for length in (rounds, 2 * rounds, rounds):  # the first run of a length loads it
            once = seconds(length, 1)
        dispatches = max(1, math.ceil(_LEAST_SECONDS / once))
        differences = [
            seconds(2 * rounds, dispatches) - seconds(rounds, dispatches) for _ in range(repeats)
        ]
        return statistics.median(differences) / (dispatches * rounds * len(inputs)) * 1e6


def median_us(
    function: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    *,
    state: Any = None,
    clear_l2: bool = False,
    rounds: int = 10,
    repeats: int = 9,
) -> float:
    """Median device time of one call, in microseconds.

    Args:
      function: function(*args) -> out, or with a state function(state, *args) -> (state, out).
      inputs: tuples of arguments, each with other arrays.
      state: arrays that the calls update in place; a copy of them is donated.
      clear_l2: whether 256 MiB are written before each call; the time of that is subtracted.
      rounds: how often the shorter loop goes through the inputs. Loops are dispatched until they
        take 10 ms.
      repeats: number of measurements; the median of them is returned.
    """
    if clear_l2:
        clearing = median_us(_clear_alone, [()], state=_cleared(), rounds=rounds, repeats=repeats)
        function = clear_before(function, has_state=state is not None)
        inputs = [(args,) for args in inputs]
        both = (_cleared(), state)
        timed = median_us(function, inputs, state=both, rounds=rounds, repeats=repeats)
        return timed - clearing
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        loops = Loops(function, inputs, state, rounds=rounds, pool=pool)
    return loops.median_us(inputs, state, repeats=repeats)


def enough_rounds(roofline_us: float, num_inputs: int, *, least: int = 10) -> int:
    """Rounds of a loop that takes at least 2 ms if no call is faster than its roofline."""
    call_us = max(roofline_us, _LEAST_CALL_US)
    return max(least, math.ceil(_LEAST_LOOP_US / (call_us * num_inputs)))


def loop_over(function: Callable[..., Any], *, has_state: bool) -> Callable[..., Any]:
    """Makes loop(length, state, inputs) -> (rounds, state, results of the last round).

    Every call of each round is made. The barrier ties the inputs to the round; without it XLA could
    see that they never change, and take the calls out of the loop. Outputs are carried, so that
    each is written, and none is copied. The calls of a round become one CUDA graph, which must not
    run them side by side. The function is jitted, so that it is lowered once, not for each input.
    """
    function = jax.jit(function)

    def loop(length: int, state: Any, inputs: Any) -> Any:
        def call_each(state: Any, inputs: Any) -> Any:
            outs = []
            for args in inputs:
                if has_state:
                    state, out = function(state, *args)
                else:
                    out = function(*args)
                outs.append(out)
            return state, outs

        def one_round(carry: Any, _: None) -> Any:
            count, state, _ = carry
            count, state, held = jax.lax.optimization_barrier((count + 1, state, inputs))
            return (count, *call_each(state, held)), None

        outs = jax.eval_shape(call_each, state, inputs)[1]
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), outs)
        return jax.lax.scan(one_round, (jnp.int32(0), state, zeros), length=length)[0]

    return loop


def clear_before(function: Callable[..., Any], *, has_state: bool) -> Callable[..., Any]:
    """The function with a state (array that fills L2, its own state), written before each call."""

    def call(both: Any, args: tuple[Any, ...]) -> Any:
        cleared, state = both
        cleared = cleared + jnp.uint32(1)
        cleared, state, args = jax.lax.optimization_barrier((cleared, state, args))
        state, out = function(state, *args) if has_state else (state, function(*args))
        cleared, out = jax.lax.optimization_barrier((cleared, out))
        return (cleared, state), out

    return call


@jax.jit
def _copied(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def _cleared() -> jax.Array:
    return jnp.zeros(_CLEARED_BYTES // 4, jnp.uint32)


def _clear_alone(cleared: jax.Array) -> tuple[jax.Array, tuple[()]]:
    return cleared + jnp.uint32(1), ()
