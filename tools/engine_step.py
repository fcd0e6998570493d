"""An engine's decode step beside its program and a loop: `python -m tools.engine_step CONFIG`.

CONFIG is as for `benchmarks.bench_engine`, and so is the loop, whose tokens stay on the device.
Prompts of one token, so that only decode steps are compiled. Prints ms a step of the engine's
rounds, of its parts on the host, of the step's program launched again and again, whose tokens
nobody reads, by the engine's launcher and by the jitted function, and of the loop: few calls at a
time on an idle device, so that no call waits for a place in the queue. With `--top-p` below 1 a
step takes the program of all draws.
"""

import argparse
import collections
import functools
import time

import jax

import dsv4_jax as ds
from benchmarks.bench_engine import load_model, loop_ms
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS
from dsv4_jax.serving.device import engine_arrays

CONTEXT = 2048
LAUNCHES = 16
"""Fewer than the calls that XLA keeps in flight."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    parser.add_argument("--steps", type=int, default=200, help="steps of each of three rounds")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    arguments = parser.parse_args()
    ds.runtime.claim_memory()
    ds.set_xla_flags()
    ds.use_compilation_cache()
    config, params = load_model(arguments.config, arguments.weights, arguments.experts)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {arguments}", flush=True)
    for requests in arguments.requests:
        time_engine(config, params, requests, arguments)
        sizes = {"requests": requests, "context": CONTEXT, "steps": LAUNCHES}
        loop = [round(ms, 3) for ms in loop_ms(config, params, **sizes)]
        print(f"{requests} requests, loop: {loop}", flush=True)


def time_engine(config, params, requests, arguments):
    """Prints what an engine's steps take."""
    sizes = {"max_requests": requests, "max_context_tokens": CONTEXT}
    engine = ds.Engine(config, params, **sizes, prefill_tokens=(max(64, requests),))
    wanted = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    for seed in range(requests):
        new = CONTEXT - 1
        engine.submit([1], max_new_tokens=new, stop_token_ids=(), seed=seed, **wanted)
    for _ in range(20):
        engine.step()
    rounds = [milliseconds(engine.step, arguments.steps) for _ in range(3)]
    print(f"{requests} requests, engine: {rounds}", flush=True)
    arrays = engine.loop.runner.devices
    launcher = arrays.launcher
    spent, calls = time_parts(arrays)
    milliseconds(engine.step, arguments.steps)
    parts = {name: round(1e3 * s / arguments.steps, 3) for name, s in spent.items()}
    print(f"{requests} requests, parts: {parts}", flush=True)
    (program, _, step_input, _), static = calls[-1]
    ways = {
        "launcher": functools.partial(launcher, program),
        "jitted function": functools.partial(program, params),
    }
    state = [arrays.cache, arrays.last]
    for name, launch in list(ways.items()) * 3:
        found = []
        for waits in (False, True):
            called, whole, state = time_launches(
                lambda state, launch=launch: launch(state[0], step_input, state[1], **static),
                state,
                waits=waits,
            )
            found.append((round(called, 3), round(whole, 3)))
        print(f"{requests} requests, {name}, its call and all: {found[0]}, ", end="")
        print(f"where each waits for the one before: {found[1]}", flush=True)


def time_launches(launch, state, *, waits):
    """Milliseconds of a call and of a step, on average; and what the last one gave."""
    called, started = 0.0, time.perf_counter()
    for _ in range(LAUNCHES):
        begun = time.perf_counter()
        state = launch(state)
        called += time.perf_counter() - begun
        if waits:
            jax.block_until_ready(state)
    jax.block_until_ready(state)
    whole = time.perf_counter() - started
    return 1e3 * called / LAUNCHES, 1e3 * whole / LAUNCHES, state


def milliseconds(step, count):
    """Of a step, on average."""
    started = time.perf_counter()
    for _ in range(count):
        step()
    return round(1e3 * (time.perf_counter() - started) / count, 3)


def time_parts(arrays):
    """Seconds by name, as they are spent; and arguments of the last call of the step."""
    spent, calls = collections.Counter(), collections.deque(maxlen=1)

    def timed(name, function):
        def call(*arguments, **options):
            if name == "launcher":
                calls.append((arguments, options))
            started = time.perf_counter()
            result = function(*arguments, **options)
            spent[name] += time.perf_counter() - started
            return result

        return call

    for name in ("_copied", "gather"):
        setattr(engine_arrays, name, timed(name, getattr(engine_arrays, name)))
    for name in ("launcher", "launch", "read", "change", "save"):
        setattr(arrays, name, timed(name, getattr(arrays, name)))
    return spent, calls


if __name__ == "__main__":
    main()
