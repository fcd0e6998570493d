"""Times `append_tokens` on a GPU: window row and compressor states of a layer, one launch.

    PYTHONPATH=.:tests python -m benchmarks.bench_append [--json FILE]

Microseconds per layer: 20 layers with buffers of their own, one after the other in one program,
repeated on the device; the median of repeats, and of the kernel alone as the profiler has it (the
rest are launches that the host makes). Bytes are what is kept, read and written once.
"""

import argparse
import functools
import json
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import CACHE_FORMATS

C, IC, ROPE, WINDOW = 512, 128, 64, 128
OURS = ("flush_", "append_")
COPY_BYTES_PER_US = 4.3e6  # of an H200, measured


def repeated(step, num_loops):
    """A jitted function that runs step(donated, shared, rows, layer) for all layers, many times."""
    step = jax.jit(step)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(donated, shared, rows):
        def body(_, donated):
            for layer, layer_rows in enumerate(rows):
                donated = step(donated, shared, layer_rows, jnp.int32(layer))
            return donated

        return jax.lax.fori_loop(0, num_loops, body, donated)

    return run


def device_time_us(step, donated, shared, rows, *, num_loops=25, repeats=7):
    """Microseconds of a step per layer, and of a kernel in it; `rows` has an item per layer."""
    run = repeated(step, num_loops)
    donated = jax.block_until_ready(run(donated, shared, rows))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        donated = jax.block_until_ready(run(donated, shared, rows))
        times.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(donated, shared, rows))
        kernel_us = kernel_time_us(folder)
    return {"time_us": statistics.median(times) / num_loops / len(rows) * 1e6} | kernel_us


def kernel_time_us(folder):
    """The median microseconds of our kernels in a profile."""
    durations = []
    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            streams = [
                line for line in plane.lines if "GPU" in plane.name and "Stream" in line.name
            ]
            for line in streams:
                durations += [e.duration_ns for e in line.events if e.name.startswith(OURS)]
    return {"kernel_us": statistics.median(durations) / 1e3} if durations else {}


def zero_planes(codec, dim, lead):
    """Planes of zeros."""
    shapes = codec.plane_shapes(dim, ROPE)
    return {name: jnp.zeros((*lead, *s.shape), s.dtype) for name, s in shapes.items()}


def projections(key, lead, width):
    """Random values and scores."""
    keys = jax.random.split(key)
    return {
        name: jax.random.normal(k, (*lead, width))
        for name, k in zip(("values", "scores"), keys, strict=True)
    }


def append_case(kind, rows, tokens_per_row, cache_format, *, layers, length=8192):
    """A layer type's arrays and one call: every row adds `tokens_per_row` tokens."""
    codec = CACHE_FORMATS[cache_format].entry
    key, num_tokens = jax.random.key(0), rows * tokens_per_row
    rings = [zero_planes(codec, C, (layers, rows, WINDOW))]
    new = [[zero_planes(codec, C, (num_tokens,))] for _ in range(layers)]
    running, folded = None, [None] * layers
    if kind == "csa":
        for dim in (C, IC):
            rings.append(projections(key, (layers, rows, 8), 2 * dim))
            for per_layer in new:
                per_layer.append(projections(key, (num_tokens,), 2 * dim))
    else:
        running = jnp.zeros((layers, rows, 3, C))
        folded = [projections(key, (num_tokens,), C) for _ in range(layers)]
    call = {
        "slots": jnp.asarray(np.random.default_rng(0).permutation(rows), jnp.int32),
        "lengths": jnp.full(rows, length if tokens_per_row == 1 else 0, jnp.int32),
        "counts": jnp.full(rows, tokens_per_row, jnp.int32),
        "offsets": jnp.arange(rows, dtype=jnp.int32) * tokens_per_row,
    }
    entry_bytes = CACHE_FORMATS[cache_format].entry_bytes(C, ROPE)
    kept = min(tokens_per_row, WINDOW) * entry_bytes
    kept += 16 * (C + IC) * min(tokens_per_row, 8) if kind == "csa" else 16 * C + 12 * C
    per_layer = list(zip(new, folded, strict=True))
    return (tuple(rings), running), call, per_layer, 2 * rows * kept


def append_step(donated, call, rows, layer, *, max_count, backend=None):
    """One layer's append."""
    (rings, running), (new, folded) = donated, rows
    return pk.append_tokens(
        rings,
        new,
        running,
        folded,
        **call,
        layer=layer,
        rate=128,
        max_count=max_count,
        backend=backend,
    )


def measure(kind, rows, tokens_per_row, cache_format="fp8_ue8m0", backend=None):
    """A row of the table."""
    layers = 20 if tokens_per_row == 1 else 4
    *case, num_bytes = append_case(kind, rows, tokens_per_row, cache_format, layers=layers)
    step = functools.partial(append_step, max_count=tokens_per_row, backend=backend)
    times = device_time_us(step, *case)
    return {
        "op": f"append {kind}",
        "rows": rows,
        "tokens": rows * tokens_per_row,
        "format": cache_format,
        "bytes": num_bytes,
        "share_of_copy": num_bytes / times["time_us"] / COPY_BYTES_PER_US,
    } | times


def print_row(row):
    print(
        f"{row['op']:16s} {row['rows']:4d} rows {row['tokens']:6d} tokens {row['format']:20s} "
        f"{row['time_us']:8.2f} us, kernel {row.get('kernel_us', float('nan')):8.2f} us  "
        f"{row['bytes'] / 1e6:8.3f} MB  {row['share_of_copy']:6.1%}",
        flush=True,
    )


def report(results, path):
    """Writes the rows with the device they were taken on."""
    device = jax.devices()[0].device_kind
    with open(path, "w") as file:
        json.dump({"device": device, "jax": jax.__version__, "rows": results}, file, indent=1)


@pytest.mark.bench
def test_append_tokens(capsys):
    with capsys.disabled():
        print_row(measure("csa", 64, 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="bench_append.json")
    arguments = parser.parse_args()
    results = []
    for kind in ("csa", "hca"):
        for rows, tokens in ((1, 1), (8, 1), (64, 1), (256, 1), (1, 8192), (1, 8190), (8, 1024)):
            results.append(measure(kind, rows, tokens))
            print_row(results[-1])
    report(results, arguments.json)


if __name__ == "__main__":
    main()
