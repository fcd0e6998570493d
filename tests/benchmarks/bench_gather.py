"""Dense gathers against what their bytes take: `python -m benchmarks.bench_gather`.

Requests have different contexts' worth of blocks in any order; scales are of ordinary size.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks import harness
from helpers import gather_cases as cases

NUM_LAYERS = 2
SELECTED = [(1, 16384), (32, 16384), (512, 16384), (512, 1 << 17), (1024, 16384)]
ALL_HCA = [32, 1024, 8192]
NUM_INPUTS = 4
KERNEL = "triton_gpu"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON to keep the rows in")
    bandwidth = harness.copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    rows = [
        entries_row("csa", num_selected, context, bandwidth) for num_selected, context in SELECTED
    ]
    rows += [entries_row("hca", n, n * cases.BLOCK_TOKENS, bandwidth) for n in ALL_HCA]
    rows.append(window_row(bandwidth))
    harness.report(rows, parser.parse_args().results)


def entries_row(family, num_selected, context_tokens, bandwidth):
    """64 requests, that many of the entries of each, in any order, or all HCA entries in order."""
    specs = cases.entries_specs(family, num_selected, NUM_LAYERS, context_tokens)
    pool, table, requests, index, _ = specs
    num_entries = context_tokens // cases.RATES[family]
    key = jax.random.key(0)
    planes = fill_planes(pool)
    blocks = jax.random.permutation(key, table.size).astype(jnp.int32).reshape(table.shape)
    request_ids = jnp.arange(requests.size, dtype=jnp.int32)
    inputs = [
        (planes, blocks, request_ids, choose(seed, index.shape, num_entries), jnp.int32(1))
        for seed in range(NUM_INPUTS)
    ]
    measured = harness.median_us(functools.partial(cases.dense_entries, backend=KERNEL), inputs)
    what = "all" if num_selected == num_entries else f"{num_selected} of"
    return harness.row(
        "gather_entries",
        f"{requests.size} x {what} {num_entries} {family.upper()} entries",
        measured,
        limit_us=index.size * bytes_moved() / bandwidth * 1e6,
    )


def window_row(bandwidth):
    """64 requests, one token each, whose window is full."""
    ring, rows, slots, *_ = cases.window_specs(NUM_LAYERS)
    planes, new = fill_planes(ring), fill_planes(rows)
    inputs = [
        (
            planes,
            new,
            jax.random.permutation(jax.random.key(seed), slots.size).astype(jnp.int32),
            positions := jnp.arange(1000, 1000 + slots.size, dtype=jnp.int32),
            positions,
            jnp.int32(1),
        )
        for seed in range(NUM_INPUTS)
    ]
    return harness.row(
        "gather_window",
        f"{slots.size} x {cases.WINDOW} tokens",
        harness.median_us(functools.partial(cases.dense_window, backend=KERNEL), inputs),
        limit_us=slots.size * cases.WINDOW * bytes_moved() / bandwidth * 1e6,
    )


def bytes_moved():
    """Of one vector: its planes read, bf16 written, an index read, a flag written."""
    stored = cases.CODEC.plane_shapes(cases.DIM, cases.ROPE).values()
    return sum(s.size * s.dtype.itemsize for s in stored) + 2 * cases.DIM + 4 + 1


def choose(seed, shape, num_entries):
    """i32[T, K], different entries in any order; all of them in order if there are no more."""
    if shape[1] == num_entries:
        return jnp.broadcast_to(jnp.arange(num_entries, dtype=jnp.int32), shape)
    scores = jax.random.uniform(jax.random.key(seed), (shape[0], num_entries))
    return jax.lax.top_k(scores, shape[1])[1]


def fill_planes(shapes):
    """Codes of any value but NaN, scales between 2^-7 and 1, rope dims of the order of 1."""
    return {name: _fill(spec.shape, spec.dtype, name == "scale") for name, spec in shapes.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _fill(shape, dtype, is_scale):
    key = jax.random.key(len(shape))
    if dtype != jnp.uint8:
        return jax.random.normal(key, shape, dtype)
    low, high = (120, 128) if is_scale else (0, 127)
    return jax.random.randint(key, shape, low, high, jnp.uint8)


if __name__ == "__main__":
    main()
