"""Times jitted calls on a device, without Python and without the constant cost of a dispatch.

A loop on the device calls a function on several different inputs, often; the time of a loop twice
as long less that of the loop is calls alone. Inputs that together exceed the L2 cache are read
from memory each time; for smaller ones there is `clear_l2`. Of many cases all loops are compiled
before the first is timed, several at once; each row is printed as soon as it is measured, and kept
as soon as it is complete.

Rivals are called after all of ours. Some calls of torch, making its streams among them, let every
later launch of the process take 0.5 us more (H200); copies that JAX makes to the device and from it
did not. So rivals' times are of torch as it is.
"""

import concurrent.futures
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv4_jax.bench.report import first_line
from helpers import gpu_results

_FLUSH_BYTES = 256 * 2**20
_COPY_BYTES = 512 * 2**20
_LEAST_SECONDS = 0.01
_LEAST_LOOP_US = 2000.0
_LEAST_CALL_US = 2.0
"""So long that a loop takes the device longer than its dispatch takes the host."""
_WIDTHS = {
    "op": 24,
    "shape": 44,
    "ours_us": 9,
    "rival": 37,
    "rival_us": 9,
    "ratio": 6,
    "limit_share": 11,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What becomes a row.

    Attributes:
      op: what is timed.
      shape: of its calls, in words.
      function: as for `median_us`.
      make: () -> (state, inputs) for the function; no state is None.
      limit_us: what the bytes or the products alone would take, or None.
      rounds: as for `median_us`; by default as many as a short call needs for a loop of 2 ms.
      rival: name of another project's kernel, or None.
      rival_us: () -> its microseconds; called after all cases of ours were measured.
    """

    op: str
    shape: str
    function: Callable
    make: Callable
    limit_us: float | None = None
    rounds: int | None = None
    rival: str | None = None
    rival_us: Callable | None = None


class Loops:
    """A function's loop and the one twice as long, compiled in other threads.

    Args:
      function: as for `median_us`.
      inputs: as for `median_us`, or `jax.ShapeDtypeStruct` in place of arrays.
      state: likewise.
      rounds: as for `median_us`.
      pool: executor that compiles; what is lowered is lowered here.
    """

    def __init__(self, function, inputs, state, *, rounds, pool):
        run = jax.jit(
            _loop(function, state is not None),
            static_argnums=0,
            donate_argnums=1,
            compiler_options={"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"},
        )
        self._rounds = rounds
        self._compiled = {
            length: pool.submit(run.lower(length, state, inputs).compile)
            for length in (rounds, 2 * rounds)
        }

    def median_us(self, inputs, state=None, *, repeats=9):
        """See the function of that name."""
        compiled = {length: future.result() for length, future in self._compiled.items()}
        state = None if state is None else _copied(state)
        rounds = self._rounds

        def seconds(length, dispatches):
            nonlocal state
            outs = None
            start = time.perf_counter()
            for _ in range(dispatches):
                _, state, outs = compiled[length](state, inputs)
            jax.block_until_ready((state, outs))
            return time.perf_counter() - start

        for length in (rounds, 2 * rounds, rounds):  # the first run of a length loads it
            once = seconds(length, 1)
        dispatches = max(1, math.ceil(_LEAST_SECONDS / once))
        differences = [
            seconds(2 * rounds, dispatches) - seconds(rounds, dispatches) for _ in range(repeats)
        ]
        return statistics.median(differences) / (dispatches * rounds * len(inputs)) * 1e6


def median_us(function, inputs, *, state=None, clear_l2=False, rounds=10, repeats=9):
    """Median device time of one call, in microseconds.

    Args:
      function: function(*args) -> out, or with a state function(state, *args) -> (state, out).
      inputs: tuples of arguments, different ones.
      state: what calls update in place; a copy of it is donated.
      clear_l2: whether 256 MiB are written before each call; that time is taken off.
      rounds: how often the shorter loop goes through the inputs; loops are dispatched until they
        take 10 ms.
      repeats: measurements that the median is of.
    """
    if clear_l2:
        flush = median_us(_without_call, [()], state=_flushed(), rounds=rounds, repeats=repeats)
        inputs = [(args,) for args in inputs]
        flushed = (_flushed(), state)
        function = _after_flush(function, has_state=state is not None)
        timed = median_us(function, inputs, state=flushed, rounds=rounds, repeats=repeats)
        return timed - flush
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        loops = Loops(function, inputs, state, rounds=rounds, pool=pool)
    return loops.median_us(inputs, state, repeats=repeats)


def enough_rounds(limit_us, num_inputs, *, least=10):
    """For a loop of 2 ms, of calls that take no less than their limit."""
    call_us = max(limit_us, _LEAST_CALL_US)
    return max(least, math.ceil(_LEAST_LOOP_US / (call_us * num_inputs)))


def copy_bandwidth():
    """Bytes per second that one kernel reads and writes, together."""
    arrays = [(jnp.full(_COPY_BYTES // 4, n, jnp.uint32),) for n in range(2)]
    return 2 * _COPY_BYTES / (median_us(lambda x: x ^ jnp.uint32(1), arrays) * 1e-6)


def measure(cases, path=None):
    """Prints a row for each case, again with its rival, and with a path keeps it there.

    A row replaces that of the same op and shape. One that fails says why, and the others follow.

    Returns:
      The exit status: 1 if a case or a rival failed, else 0.
    """
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    start = time.perf_counter()
    cases = list(cases)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        ahead = [attempt(_compile_ahead, case, pool) for case in cases]
    print(f"loops of {len(cases)} rows compiled in {time.perf_counter() - start:.0f} s")
    print(_line({key: key for key in _WIDTHS}), flush=True)
    compared, status = [], 0

    def report(measured, *, complete=True):
        nonlocal status
        print(_line(measured), flush=True)
        if complete and path is not None:
            keep(measured, path)
        if "failed" in measured or "rival_failed" in measured:
            status = 1

    for case in cases:
        measured = _measured(case, *ahead.pop(0))
        alone = case.rival_us is None or "failed" in measured
        report(measured, complete=alone)
        if not alone:
            compared.append((case, measured["ours_us"]))
    for case, ours_us in compared:
        report(_beside_rival(case, ours_us))
    return status


def attempt(call, *args):
    """What a call gives and None, or None and the first line of what it raised."""
    try:
        return call(*args), None
    except Exception as error:
        return None, first_line(error)


def row(op, shape, ours_us, *, rival=None, rival_us=None, limit_us=None):
    """One line of a report; `limit_us` is what the bytes or the products alone would take."""
    share = None if None in (ours_us, limit_us) else round(limit_us / ours_us, 2)
    return {
        "op": op,
        "shape": shape,
        "ours_us": None if ours_us is None else round(ours_us, 2),
        "rival": rival,
        "rival_us": rival_us,
        "ratio": None if None in (ours_us, rival_us) else round(ours_us / rival_us, 2),
        "limit_share": share,
    }


def keep(new, path):
    """Puts a row in place of that of the same op and shape, or behind all others."""
    rows = {(r["op"], r["shape"]): r for r in gpu_results.read(path).get("rows", [])}
    rows[new["op"], new["shape"]] = new
    gpu_results.update(path, rows=list(rows.values()))


def _compile_ahead(case, pool):
    state, inputs = jax.eval_shape(case.make)
    rounds = case.rounds or enough_rounds(case.limit_us or 0.0, len(inputs))
    return Loops(case.function, inputs, state, rounds=rounds, pool=pool)


def _measured(case, loops, failed):
    """The row of a case without its rival; its arrays are gone when the next one is made."""
    ours_us = None
    if failed is None:
        ours_us, failed = attempt(_time, case, loops)
    made = row(case.op, case.shape, ours_us, limit_us=case.limit_us)
    return made if failed is None else made | {"failed": failed}


def _beside_rival(case, ours_us):
    """The row of a case with its rival."""
    rival_us, failed = attempt(case.rival_us)
    made = row(
        case.op,
        case.shape,
        ours_us,
        rival=case.rival,
        rival_us=rival_us,
        limit_us=case.limit_us,
    )
    return made if failed is None else made | {"rival_failed": failed}


def _time(case, loops):
    state, inputs = case.make()
    return loops.median_us(inputs, state)


def _line(cells):
    """A row to be printed."""
    if "failed" in cells:
        text = f"{_padded(cells, ['op', 'shape'])}  failed, {cells['failed']}"
    else:
        text = _padded(cells, _WIDTHS)
    if "rival_failed" in cells:
        text += f"  rival failed, {cells['rival_failed']}"
    return text.rstrip()


def _padded(cells, keys):
    texts = {key: "" if cells[key] is None else str(cells[key]) for key in keys}
    return "  ".join(text.ljust(_WIDTHS[key]) for key, text in texts.items())


@jax.jit
def _copied(arrays):
    return jax.tree.map(jnp.copy, arrays)


def _loop(function, has_state):
    """loop(length, state, inputs): the results of the last round, every call of each round made.

    The barrier ties inputs to the round, else they could be seen not to change and the calls
    be taken out of the loop. Outputs are carried, so that every one is written, and copied nowhere.
    The calls of a round become one CUDA graph, which must not run them side by side. The function
    is jitted, so that it is lowered once and not for each input.
    """
    function = jax.jit(function)

    def loop(length, state, inputs):
        def call_each(state, inputs):
            outs = []
            for args in inputs:
                if has_state:
                    state, out = function(state, *args)
                else:
                    out = function(*args)
                outs.append(out)
            return state, outs

        def one_round(carry, _):
            count, state, _ = carry
            count, state, held = jax.lax.optimization_barrier((count + 1, state, inputs))
            return (count, *call_each(state, held)), None

        outs = jax.eval_shape(call_each, state, inputs)[1]
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), outs)
        return jax.lax.scan(one_round, (jnp.int32(0), state, zeros), length=length)[0]

    return loop


def _flushed():
    return jnp.zeros(_FLUSH_BYTES // 4, jnp.uint32)


def _without_call(flushed):
    return flushed + jnp.uint32(1), ()


def _after_flush(function, *, has_state):
    def call(both, args):
        flushed, state = both
        flushed = flushed + jnp.uint32(1)
        flushed, state, args = jax.lax.optimization_barrier((flushed, state, args))
        state, out = function(state, *args) if has_state else (state, function(*args))
        flushed, out = jax.lax.optimization_barrier((flushed, out))
        return (flushed, state), out

    return call
