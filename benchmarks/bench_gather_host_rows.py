"""Rows of tables in the host's memory: `python -m benchmarks.bench_gather_host_rows [results]`.

Tables of V4.1-Flash's rows are pinned, and rows are random. The roofline counts the rows' bytes at
the bandwidth of a copy from pinned memory. Beside the kernel stands what it saves: the host gathers
the rows with NumPy, and brings them. First the bits are compared with the tables.
"""

import argparse
import functools
import itertools
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases.engram import COLUMNS, ROW_BYTES, TABLE_ROWS, TABLES, TOKENS
from dsv4_jax.bench import compare, timing
from dsv4_jax.engram.pinned_memory import pin
from pallas_kernels import gather_host_rows
from pallas_kernels.gather_host_rows.op import split_address
from pallas_kernels.gather_host_rows.reference import WORD_BYTES

NUM_INPUTS = 4
BASELINE = "gathered by the host and brought"
COPIED_BYTES, REPEATS = 2**28, 7


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON file that keeps the rows")
    args = parser.parse_args()
    if jax.default_backend() == "gpu":
        compare_bits()
    bandwidth = link_bandwidth()
    print(f"from pinned memory {bandwidth / 1e9:.1f} GB/s, of which the last column is a share")
    return compare.measure([case(count, bandwidth) for count in TOKENS], args.results)


@functools.cache
def tables():
    """u8[TABLE_ROWS, bytes], a plane of codes and one of scales for each table, and addresses."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(TABLES):
        planes = [np.empty((TABLE_ROWS, size), np.uint8) for size in ROW_BYTES]
        for plane in planes:
            plane.reshape(-1).view(np.uint32)[:] = np.arange(
                plane.size // WORD_BYTES, dtype=np.uint32
            )
            plane ^= rng.integers(0, np.iinfo(np.uint8).max, plane.shape[1:], np.uint8)[None]
        found.append(planes)
    begin = iter(pin([plane for planes in found for plane in planes]))
    halves = [[split_address(next(begin)) for _ in planes] for planes in found]
    return found, jnp.asarray(halves, jnp.int32)


def compare_bits():
    """Of a few tokens."""
    stored, addresses = tables()
    rows = draw(TOKENS[1], np.random.default_rng(2))
    found = jax.jit(functools.partial(gather_host_rows, row_bytes=ROW_BYTES))(rows, addresses)
    for plane, wanted in zip(found, taken(stored, np.asarray(rows)), strict=True):
        np.testing.assert_array_equal(plane, wanted)
    print("the tables' bits")


def case(count, bandwidth):
    """A call of so many tokens; each reads other rows."""
    return compare.Case(
        "gather_host_rows",
        f"{count} tokens",
        functools.partial(gather_host_rows, row_bytes=ROW_BYTES, backend="triton_gpu"),
        functools.partial(make, count),
        roofline_us=count * TABLES * COLUMNS * sum(ROW_BYTES) / bandwidth * 1e6,
        baseline=BASELINE,
        baseline_us=functools.partial(host_us, count),
    )


def make(count):
    """For each call rows and the tables' addresses."""
    rng, (_, addresses) = np.random.default_rng(count), tables()
    return None, [(draw(count, rng), addresses) for _ in range(NUM_INPUTS)]


def draw(count, rng):
    """i32[count, TABLES, COLUMNS], rows of any table."""
    return jnp.asarray(rng.integers(0, TABLE_ROWS, (count, TABLES, COLUMNS)), jnp.int32)


def taken(stored, rows):
    """What NumPy finds in the tables."""
    return [
        np.stack([planes[place][rows[:, n]] for n, planes in enumerate(stored)], axis=1)
        for place in range(len(ROW_BYTES))
    ]


def host_us(count):
    """Microseconds of a gather by NumPy and its copy to the device."""
    stored, _ = tables()
    every = itertools.cycle([np.asarray(rows) for rows, _ in make(count)[1]])
    return round(1e6 * seconds_of(lambda: jax.device_put(taken(stored, next(every)))), 2)


def link_bandwidth():
    """Bytes a second of a copy from pinned memory to the device."""
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device)
    kind = None if device.platform == "cpu" else "pinned_host"
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    source = jax.device_put(np.ones(COPIED_BYTES, np.uint8), pinned)
    return COPIED_BYTES / seconds_of(lambda: jax.device_put(source, there, may_alias=False))


def seconds_of(bring):
    """Of a call that brings arrays to the device, the median of a few."""
    timing.dispatch(lambda _: bring(), None, 1)
    return statistics.median(timing.dispatch(lambda _: bring(), None, 1)[0] for _ in range(REPEATS))


if __name__ == "__main__":
    sys.exit(main())
