"""Dense gathers beside the reference through XLA: `python -m benchmarks.bench_gather [results]`.

The blocks of each request lie in any order, and scales are of ordinary size.
"""

import argparse
import functools
import sys

import jax.numpy as jnp
import numpy as np

from benchmarks import draws
from benchmarks.cases.cache import (
    ALL_HCA,
    BLOCK_TOKENS,
    COMPRESSION_RATIO,
    ROPE,
    SELECTED,
    WINDOW,
    C,
)
from dsv4_jax.bench import compare, loops, timing
from helpers import gather_cases as cases
from helpers.calls import make_call
from pallas_kernels import LayerPlanes

NUM_LAYERS = 2
NUM_INPUTS = 4
KERNEL = "triton_gpu"
BASELINE = "the reference through XLA"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON file that keeps the rows")
    args = parser.parse_args()
    bandwidth = timing.copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    rows = [("csa", num_selected, context) for num_selected, context in SELECTED]
    rows += [("hca", n, n * BLOCK_TOKENS) for n in ALL_HCA]
    measured = [entries_case(*row, bandwidth) for row in rows]
    return compare.measure([*measured, window_case(bandwidth)], args.results)


def entries_case(family, num_selected, context_tokens, bandwidth):
    """64 requests with so many selected entries each, in any order, or all of them in order."""
    specs = cases.entries_specs(family, num_selected, NUM_LAYERS, context_tokens)
    pool, call, index = specs
    table, requests = call.block_table, call.segment_ids
    num_entries = context_tokens // COMPRESSION_RATIO[family]

    def make():
        rng = np.random.default_rng(0)
        planes, blocks = draws.make(planes_of(pool.planes)), draws.blocks(rng, *table.shape)
        stored = LayerPlanes(planes, jnp.int32(1), cases.CODEC)
        queries = make_call(blocks, np.arange(requests.size))
        chosen = [choose(rng, index.shape, num_entries) for _ in range(NUM_INPUTS)]
        return None, [(stored, queries, each) for each in chosen]

    what = "all" if num_selected == num_entries else f"{num_selected} of"
    return compare.Case(
        "gather_entries",
        f"{requests.size} x {what} {num_entries} {family.upper()} entries",
        functools.partial(cases.dense_entries, backend=KERNEL),
        make,
        roofline_us=index.size * bytes_moved() / bandwidth * 1e6,
        baseline=BASELINE,
        baseline_us=functools.partial(reference_us, cases.dense_entries, make),
    )


def window_case(bandwidth):
    """64 requests with full windows, one token each."""
    ring, rows, call = cases.window_specs(NUM_LAYERS)
    slots = call.slots

    def make():
        rng = np.random.default_rng(0)
        planes, new = draws.make([planes_of(ring.planes), planes_of(rows)])
        stored = LayerPlanes(planes, jnp.int32(1), cases.CODEC)
        positions = np.arange(1000, 1000 + slots.size)
        tokens = {"positions": positions, "lengths": positions}
        table, segments = np.full((slots.size, 1), -1), np.arange(slots.size)
        calls = [
            make_call(table, segments, slots=draws.blocks(rng, slots.size), **tokens)
            for _ in range(NUM_INPUTS)
        ]
        return None, [(stored, new, call) for call in calls]

    return compare.Case(
        "gather_window",
        f"{slots.size} x {WINDOW} tokens",
        functools.partial(cases.dense_window, backend=KERNEL),
        make,
        roofline_us=slots.size * WINDOW * bytes_moved() / bandwidth * 1e6,
        baseline=BASELINE,
        baseline_us=functools.partial(reference_us, cases.dense_window, make),
    )


def reference_us(function, make):
    """Median microseconds of the reference, compiled by XLA."""
    function = functools.partial(function, backend="reference")
    return round(loops.median_us(function, make()[1], rounds=100), 2)


def bytes_moved():
    """Bytes per vector: planes and an index are read, bf16 and a flag are written."""
    stored = cases.CODEC.plane_shapes(C, ROPE).values()
    return sum(s.size * s.dtype.itemsize for s in stored) + 2 * C + 4 + 1


def choose(rng, shape, num_entries):
    """i32[T, K], distinct entries in any order; if K is all of them, in ascending order."""
    if shape[1] == num_entries:
        every = np.arange(num_entries, dtype=np.int32)
        return jnp.asarray(np.broadcast_to(every, shape))
    return jnp.asarray(draws.different(rng, *shape, num_entries))


def planes_of(shapes):
    """Draws of codes without NaN, scales between 2^-7 and 1, and rope dims of about 1."""

    def draw(name, spec):
        if spec.dtype != jnp.uint8:
            return draws.Draw(spec.shape, spec.dtype)
        among = range(120, 128) if name == "scale" else range(127)
        return draws.Draw(spec.shape, spec.dtype, among=among)

    return {name: draw(name, spec) for name, spec in shapes.items()}


if __name__ == "__main__":
    sys.exit(main())
