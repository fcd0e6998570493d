"""An engine's decode step, and what of it is the host's: `python -m tools.engine_step CONFIG`.

CONFIG is as for `benchmarks.bench_engine`, and so is the loop, whose tokens stay on the device.
Prompts are of random tokens. Prints ms of the engine's steps in rounds that take turns, by its
launcher and by the jitted function that it stands for: of the call that launches a step, of a step,
and of the host's work up to the launch where the device has ended all others. Then parts of a step
on the host, and the loop, few calls at a time, so that no call waits for a place in the queue. With
`--top-p` below 1 a step takes the program of all draws.
"""

import argparse
import collections
import time

import jax
import numpy as np

import dsv4_jax as ds
from benchmarks.bench_engine import loop_ms, start
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS
from dsv4_jax.serving.device import engine_arrays

CONTEXT, PROMPT = 4096, 120
ROUNDS = 7
LAUNCHES = 16
"""Fewer than the calls that XLA keeps in flight."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    parser.add_argument("--steps", type=int, default=60, help="steps of each round")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    arguments = parser.parse_args()
    config, params = start(arguments)
    for requests in arguments.requests:
        time_engine(config, params, requests, arguments)
        sizes = {"requests": requests, "context": CONTEXT, "steps": LAUNCHES}
        loop = [round(ms, 3) for ms in loop_ms(config, params, **sizes)]
        print(f"{requests} requests, loop: {loop}", flush=True)


def time_engine(config, params, requests, arguments):
    """Prints what an engine's steps take."""
    sizes = {"max_requests": requests, "max_context_tokens": CONTEXT, "grammars": False}
    engine = ds.Engine(config, params, **sizes, prefill_tokens=(max(64, 4 * requests),))
    engine.warmup()
    wanted = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    rng = np.random.default_rng(0)
    for seed in range(requests):
        prompt = rng.integers(2, config.vocab_size - 8, PROMPT).tolist()
        new = CONTEXT - PROMPT
        engine.submit(prompt, max_new_tokens=new, stop_token_ids=(), seed=seed, **wanted)
    while any(one.num_drawn < 8 for one in engine.requests.values()):
        engine.step()
    arrays = engine.loop.runner.devices
    ways = {"launcher": arrays.launcher, "jitted function": jitted(config, params)}
    found = {name: collections.defaultdict(list) for name in ways}
    for number in range(ROUNDS):
        for name in list(ways)[:: 1 - 2 * (number % 2)]:
            arrays.launcher = timed(ways[name], found[name]["its call"])
            milliseconds(engine.step, 5)
            found[name]["a step"].append(milliseconds(engine.step, arguments.steps))
            engine.loop.drain()
            for _ in range(12):
                jax.block_until_ready(arrays.cache)
                found[name]["the host's work on an idle device"].append(
                    milliseconds(engine.step, 1)
                )
    for name, rows in found.items():
        told = ", ".join(f"{row} {spread(values)}" for row, values in rows.items())
        print(f"{requests} requests, by the {name}, ms: {told}", flush=True)
    arrays.launcher = ways["launcher"]
    spent = time_parts(arrays)
    milliseconds(engine.step, arguments.steps)
    parts = {name: round(1e3 * s / arguments.steps, 3) for name, s in spent.items()}
    print(f"{requests} requests, parts: {parts}", flush=True)


def jitted(config, params):
    """In the place of a launcher, the jitted functions themselves."""
    return lambda program, *arguments, **static: program(
        params, *arguments, config=config, **static
    )


def timed(function, found):
    """The function, whose milliseconds are noted."""

    def call(*arguments, **options):
        started = time.perf_counter()
        result = function(*arguments, **options)
        found.append(1e3 * (time.perf_counter() - started))
        return result

    return call


def spread(values):
    """Median, least and most."""
    return f"{np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def milliseconds(step, count):
    """Of a step, on average."""
    started = time.perf_counter()
    for _ in range(count):
        step()
    return round(1e3 * (time.perf_counter() - started) / count, 3)


def time_parts(arrays):
    """Seconds by name, as they are spent."""
    spent = collections.Counter()

    def adding(name, function):
        def call(*arguments, **options):
            started = time.perf_counter()
            result = function(*arguments, **options)
            spent[name] += time.perf_counter() - started
            return result

        return call

    for name in ("_copied", "gather"):
        setattr(engine_arrays, name, adding(name, getattr(engine_arrays, name)))
    for name in ("launcher", "launch", "read", "change", "save"):
        setattr(arrays, name, adding(name, getattr(arrays, name)))
    return spent


if __name__ == "__main__":
    main()
