"""Rows packed, unpacked and summed beside XLA: `python -m benchmarks.bench_pack_rows [results]`.

Rows are V4-Flash's blocks in fp8_ue8m0, anywhere in a pool of 0.9 GB. The roofline counts every
byte that is read or written, at the bandwidth of a copy. Four runs are moved in turn: those of 64
and 16 rows come from memory, and what 1 and 4 rows hold stays in L2. First the bits of all three
are compared with the reference's.
"""

import argparse
import concurrent.futures
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import draws
from benchmarks.cases.cache import MOVED, MOVED_AMONG
from dsv4_jax.bench import compare, loops, timing
from helpers import row_cases as cases
from pallas_kernels import pack_rows, sum_rows, unpack_rows

NUM_INPUTS = 4
KERNEL = "triton_gpu"
BASELINE = "the reference through XLA"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON file that keeps the rows")
    args = parser.parse_args()
    if jax.default_backend() == "gpu":
        compare_bits()
    bandwidth = timing.copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, of which the last column is a share")
    wanted = [(op, count, bandwidth) for op in FUNCTIONS for count in MOVED]
    return compare.measure([case(*each, wanted) for each in wanted], args.results)


def compare_bits():
    """Of 64 rows, some of which are not there; unpacked to other places, also those of no row."""
    planes = draws.make(_planes())
    rng = np.random.default_rng(0)
    rows, places = (draws.blocks(rng, MOVED_AMONG)[:64].copy() for _ in range(2))
    rows[[3, 40]], places[[0, 40, 63]] = -1, -1
    found, expected = (
        jax.jit(functools.partial(pack_rows, backend=each))(planes, rows)
        for each in (KERNEL, "reference")
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    packed, sums = expected
    summed = jax.jit(functools.partial(sum_rows, backend=KERNEL))(packed)
    np.testing.assert_array_equal(summed, sums)
    found, expected = (
        jax.jit(functools.partial(unpack_rows, backend=each))(planes, places, packed)
        for each in (KERNEL, "reference")
    )
    for ours, theirs, before in zip(found, expected, planes, strict=True):
        ours, theirs, before = (
            jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (ours, theirs, before)
        )
        assert bool(jnp.array_equal(ours, theirs)), ours.shape
        assert not bool(jnp.array_equal(ours, before)), ours.shape
    print("packed, unpacked and summed to the reference's bits")


def case(op, count, bandwidth, every):
    """So many rows, of which each call takes others; the baselines of every case begin together."""
    return compare.Case(
        f"{op}_rows",
        f"{count} rows, {moved_bytes(op, count) / 1e6:.2f} MB moved",
        functools.partial(FUNCTIONS[op], backend=KERNEL),
        functools.partial(MAKERS[op], count),
        roofline_us=moved_bytes(op, count) / bandwidth * 1e6,
        baseline=BASELINE,
        baseline_us=lambda: reference_us(op, count, bandwidth, tuple(every)),
    )


def moved_bytes(op, count):
    """All that is read, and what is written but for checksums."""
    return count * cases.WIDTH["blocks"] * (1 if op == "sum" else 2)


def reference_us(op, count, bandwidth, every):
    """Median microseconds of the reference, compiled by XLA."""
    state, inputs = MAKERS[op](count)
    return round(_references(every)[op, count, bandwidth].median_us(inputs, state, repeats=5), 2)


@functools.cache
def _references(every):
    """Their loops, of which several are compiled at once."""
    pool = concurrent.futures.ThreadPoolExecutor()
    found = {}
    for op, count, bandwidth in every:
        state, inputs = jax.eval_shape(functools.partial(MAKERS[op], count))
        roofline_us = moved_bytes(op, count) / bandwidth * 1e6
        # XLA's take many times as long.
        rounds = loops.enough_rounds(10 * roofline_us, NUM_INPUTS, least=4)
        reference = functools.partial(FUNCTIONS[op], backend="reference")
        found[op, count, bandwidth] = loops.Loops(
            reference, inputs, state, rounds=rounds, pool=pool
        )
    return found


def make_pack(count):
    """Planes and, for each call, rows."""
    planes = draws.make(_planes())
    return None, [(planes, rows) for rows in _rows(count)]


def make_unpack(count):
    """The planes as the state, and for each call rows and what they hold."""
    packed = draws.make([_packed(count)] * NUM_INPUTS)
    return draws.make(_planes()), list(zip(_rows(count), packed, strict=True))


def make_sum(count):
    """For each call packed rows."""
    return None, [(packed,) for packed in draws.make([_packed(count)] * NUM_INPUTS)]


def _unpack(planes, rows, packed, *, backend):
    """The state after a call, and nothing beside it."""
    return unpack_rows(planes, rows, packed, backend=backend), ()


def _rows(count):
    every = draws.blocks(np.random.default_rng(1), MOVED_AMONG)
    return [jnp.asarray(every[i * count : (i + 1) * count]) for i in range(NUM_INPUTS)]


def _packed(count):
    return draws.Draw((count, cases.WIDTH["blocks"]), jnp.uint8, among=range(256))


def _planes():
    def draw(plane):
        among = range(256) if plane.dtype == np.uint8 else None
        return draws.Draw(plane.shape, plane.dtype, among=among)

    return [draw(plane) for plane in cases.FLASH["blocks"](MOVED_AMONG)]


FUNCTIONS = {"pack": pack_rows, "unpack": _unpack, "sum": sum_rows}
MAKERS = {"pack": make_pack, "unpack": make_unpack, "sum": make_sum}


if __name__ == "__main__":
    sys.exit(main())
