"""An engine's decode step beside its own program: `python -m programs.engine_step CONFIG`.

CONFIG is as for `benchmarks.bench_engine`. Prompts of one token, so that only the decode step is
compiled. Prints ms a step of the engine's rounds, of its parts on the host, and of the step's
program launched again and again, whose tokens nobody reads: few times on an idle device, so that no
call waits for a place in the queue. With `--move` inputs are elsewhere in each step.
"""

import argparse
import collections
import time

import jax
import jax.numpy as jnp

import dsv4_jax as ds
from benchmarks.bench_engine import load_model
from dsv4_jax.serving import engine_arrays

LAUNCHES = 16
"""Fewer than the calls that XLA keeps in flight."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--weights", choices=("dense", "released"), default="dense")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    parser.add_argument("--steps", type=int, default=200, help="steps of each of three rounds")
    parser.add_argument("--move", action="store_true")
    arguments = parser.parse_args()
    ds.runtime.claim_memory()
    ds.set_xla_flags()
    ds.use_compilation_cache()
    config, params = load_model(arguments.config, arguments.weights, arguments.experts)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {arguments}", flush=True)
    sizes = {"max_requests": arguments.requests, "max_context_tokens": 2048}
    engine = ds.Engine(config, params, **sizes, prefill_tokens=(max(64, arguments.requests),))
    for _ in range(arguments.requests):
        engine.submit([1], max_new_tokens=2047, stop_token_ids=())
    for _ in range(20):
        engine.step()
    plain = engine_arrays.jit_plain_decode_step
    if arguments.move:
        engine_arrays.jit_plain_decode_step = moving(plain)
        engine.step()
    rounds = [milliseconds(engine.step, arguments.steps) for _ in range(3)]
    print("engine:", rounds, flush=True)
    spent, calls = time_parts(engine._runner.devices)
    milliseconds(engine.step, arguments.steps)
    parts = {name: round(1e3 * s / arguments.steps, 3) for name, s in spent.items()}
    print("parts:", parts, flush=True)
    (params, _, step_input, _), static = calls[-1]
    state = [engine._runner.devices.cache, engine._runner.devices._last]
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            state = plain(params, state[0], step_input, state[1], **static)
        called = time.perf_counter() - started
        jax.block_until_ready(state)
        whole = time.perf_counter() - started
        found = [round(1e3 * seconds / LAUNCHES, 3) for seconds in (called, whole)]
        print("program alone, its calls and all:", found, flush=True)


def milliseconds(step, count):
    """Of a step, on average."""
    started = time.perf_counter()
    for _ in range(count):
        step()
    return round(1e3 * (time.perf_counter() - started) / count, 3)


def moving(plain):
    """The step, with copies of what changes."""
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    def step(params, cache, step_input, last, **static):
        return plain(params, cache, copied(step_input), copied(last), **static)

    return step


def time_parts(arrays):
    """Seconds by name, as they are spent; and arguments of the last call of the step."""
    spent, calls = collections.Counter(), collections.deque(maxlen=1)

    def timed(name, function):
        def call(*arguments, **options):
            if name == "jit_plain_decode_step":
                calls.append((arguments, options))
            started = time.perf_counter()
            result = function(*arguments, **options)
            spent[name] += time.perf_counter() - started
            return result

        return call

    for name in ("jit_plain_decode_step", "_copied", "gather"):
        setattr(engine_arrays, name, timed(name, getattr(engine_arrays, name)))
    for name in ("_step", "_read", "_change", "_save"):
        setattr(arrays, name, timed(name, getattr(arrays, name)))
    return spent, calls


if __name__ == "__main__":
    main()
