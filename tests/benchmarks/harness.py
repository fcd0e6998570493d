"""Times jitted calls on a device, without Python and without the constant cost of a dispatch.

A loop on the device calls a function on several different inputs, often; the time of a loop twice
as long less that of the loop is calls alone. Inputs that together exceed the L2 cache are read
from memory each time; for smaller ones there is `clear_l2`.
"""

import math
import statistics
import time

import jax
import jax.numpy as jnp

from helpers import gpu_results

_FLUSH_BYTES = 256 * 2**20
_COPY_BYTES = 512 * 2**20
_LEAST_SECONDS = 0.01


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
    run = jax.jit(
        _loop(function, state is not None),
        static_argnums=0,
        donate_argnums=1,
        compiler_options={"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"},
    )
    state = jax.tree.map(jnp.copy, state)

    def seconds(length, dispatches):
        nonlocal state
        outs = None
        start = time.perf_counter()
        for _ in range(dispatches):
            _, state, outs = run(length, state, inputs)
        jax.block_until_ready((state, outs))
        return time.perf_counter() - start

    for length in (rounds, 2 * rounds, rounds):  # the first run of a length compiles
        once = seconds(length, 1)
    dispatches = max(1, math.ceil(_LEAST_SECONDS / once))
    differences = [
        seconds(2 * rounds, dispatches) - seconds(rounds, dispatches) for _ in range(repeats)
    ]
    return statistics.median(differences) / (dispatches * rounds * len(inputs)) * 1e6


def copy_bandwidth():
    """Bytes per second that one kernel reads and writes, together."""
    arrays = [(jnp.full(_COPY_BYTES // 4, n, jnp.uint32),) for n in range(2)]
    return 2 * _COPY_BYTES / (median_us(lambda x: x ^ jnp.uint32(1), arrays) * 1e-6)


def row(op, shape, ours_us, *, rival=None, rival_us=None, limit_us=None):
    """One line of a report; `limit_us` is what the bytes or the products alone would take."""
    return {
        "op": op,
        "shape": shape,
        "ours_us": round(ours_us, 2),
        "rival": rival,
        "rival_us": rival_us,
        "ratio": None if rival_us is None else round(ours_us / rival_us, 2),
        "limit_share": None if limit_us is None else round(limit_us / ours_us, 2),
    }


def report(rows, path=None):
    """Prints rows and, with a path, keeps them there in place of their ops' old ones."""
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}")
    widths = {key: max(len(key), *(len(str(r[key])) for r in rows)) for key in rows[0]}
    for line in ({key: key for key in widths}, *rows):
        print("  ".join(str(line[key]).ljust(width) for key, width in widths.items()))
    if path is not None:
        replaced = {r["op"] for r in rows}
        kept = [r for r in gpu_results.read(path).get("rows", []) if r["op"] not in replaced]
        gpu_results.update(path, rows=kept + rows)


def _loop(function, has_state):
    """loop(length, state, inputs): the results of the last round, every call of each round made.

    The barrier ties inputs to the round, else they could be seen not to change and the calls
    be taken out of the loop. Outputs are carried, so that every one is written, and copied nowhere.
    The calls of a round become one CUDA graph, which must not run them side by side.
    """

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
