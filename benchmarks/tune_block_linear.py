"""Ways to cut products with quantised weights: `python -m benchmarks.tune_block_linear [name ...]`.

Each candidate of a shape is a line, as soon as it is timed: microseconds of the call, TFLOP/s,
their share of 1600, and how far the result is from that of the first candidate, which is how calls
are cut today. Names choose shapes that contain one of them.

A candidate that does not compile says why. One that breaks the device's context or never returns
takes its process with it; the next one goes on in another.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import queue
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp

from benchmarks import tuned_shapes
from dsv4_jax.bench import loops, timing
from dsv4_jax.bench.report import first_line

PEAK_TFLOPS = 1600
SECONDS_OF_A_TIMING = 0.03
QUIET_SECONDS = 60
"""After which a process that prints nothing is ended; compiling prints too."""
WRONG = 2.0**-6
"""Of the largest result: results are rounded to bf16, sums of splits come in another order."""
BEGUN, DONE = "begun", "done"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of shapes")
    parser.add_argument("--from", dest="start", type=int, help="in this process, from a candidate")
    args = parser.parse_args()
    if args.start is not None:
        return measure(args.names, args.start)
    start = 0
    while start is not None:  # this process leaves the device to the others
        start = follow(args.names, start)
    return 0


def follow(names, start):
    """Prints what a process of its own does.

    Returns:
      The candidate after the one that ended it; None if it ended by itself or never began.
    """
    command = [sys.executable, "-u", "-m", "benchmarks.tune_block_linear", *names]
    child = subprocess.Popen(
        [*command, "--from", str(start)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = queue.Queue()

    def read():
        for line in child.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    last, tail = None, []
    while True:
        try:
            line = lines.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            child.kill()
            child.wait()
            print(f"candidate {last} does not return", flush=True)
            return None if last is None else last + 1
        if line is None:
            break
        word, _, rest = line.partition(" ")
        if word == BEGUN:
            last = int(rest)
        elif word == DONE:
            print(rest, flush=True)
        else:
            tail = [*tail[-4:], line]
    if child.wait() == 0:
        return None
    print(f"candidate {last} ended its process: {' | '.join(tail)[-600:]}", flush=True)
    return None if last is None else last + 1


def measure(names, start):
    """Times candidates in turn; a shape's are compiled in threads while the last's are timed."""
    print(f"{DONE} {jax.devices()[0].device_kind}, jax {jax.__version__}")
    cases = tuned_shapes.candidates(names)
    shapes = list(dict.fromkeys(case.calls for case in cases[start:]))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = lower_shape(cases, shapes[0], start, pool) if shapes else {}
        for following in [*shapes[1:], None] if shapes else []:
            ahead = lower_shape(cases, following, start, pool) if following else {}
            time_shape(cases, compiled, start)
            compiled = ahead
    sys.stdout.flush()
    os._exit(0)  # whatever the driver has to say now


def lower_shape(cases, shape, start, pool):
    """{number of a candidate: its future} of a shape, from a candidate on, and of the first one."""
    numbers = [i for i, case in enumerate(cases) if case.calls is shape]
    return {i: lower(cases[i], pool) for i in numbers if i >= start or i == numbers[0]}


def time_shape(cases, compiled, start):
    """Times the candidates of a shape."""
    first = min(compiled)
    print(f"{BEGUN} {max(first, start)}")
    made = cases[first].calls.make()
    expected = results(compiled[first].result(), made)
    for i in sorted(compiled):
        if i >= start:
            print(f"{BEGUN} {i}")
            print(f"{DONE} {line_of(cases[i], compiled[i], made, expected)}")


@dataclasses.dataclass
class Failed:
    """In place of a future whose program could not be lowered."""

    error: Exception

    def result(self):
        raise self.error


def lower(case, pool):
    """The future of a compiled loop: (state, inputs) -> what `loops.loop_over` returns."""
    try:
        inputs = jax.eval_shape(case.calls.make)
        run = jax.jit(loops.loop_over(case.function, has_state=False), static_argnums=0)
        lowered = run.lower(case.calls.rounds, None, inputs)
    except Exception as error:
        return Failed(error)
    print("lowered")  # a sign of life
    return pool.submit(lowered.compile)


def results(compiled, made):
    """Those of the last round."""
    return jax.block_until_ready(compiled(None, made)[2])


def line_of(case, future, made, expected):
    """Times one candidate."""
    name = f"{case.calls.name:30} {case.name:44}"
    try:
        compiled = future.result()
    except Exception as error:
        return f"{name} does not compile, {first_line(error)}"
    found = results(compiled, made)
    worst = max(float(distance(a, b)) for a, b in zip(found, expected, strict=True))
    del found
    once, _ = timing.dispatch(lambda _: compiled(None, made)[0], None, 2)
    times = max(2, round(SECONDS_OF_A_TIMING / (once / 2)))
    taken = min(timing.dispatch(lambda _: compiled(None, made)[0], None, times)[0] for _ in "123")
    call_us = taken / (times * case.calls.rounds * len(made)) * 1e6
    tflops = case.calls.flops / call_us * 1e-6
    verdict = "" if worst <= WRONG else "  WRONG"
    return (
        f"{name} {call_us:9.1f} us {tflops:7.0f} TFLOP/s {tflops / PEAK_TFLOPS:5.0%}"
        f"  off by {worst:.1e}{verdict}"
    )


@jax.jit
def distance(found, expected):
    """Largest difference, relative to the largest result; NaN where one is."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected))


if __name__ == "__main__":
    begin = time.perf_counter()
    status = main()
    print(f"{time.perf_counter() - begin:.0f} s")
    raise SystemExit(status)
