"""Times `flush_csa` and `flush_hca` on a GPU: pool, norm, RoPE, quantise and scatter, one launch.

    PYTHONPATH=.:tests python -m benchmarks.bench_compress [--json FILE]

As `bench_append`. Bytes are those of the projections that the closing windows pool, of older state
that they pool, and of the entries. A decode row closes a window in all requests or in one of M.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks.bench_append import (
    COPY_BYTES_PER_US,
    IC,
    ROPE,
    C,
    device_time_us,
    print_row,
    projections,
    report,
    zero_planes,
)
from pallas_kernels import CACHE_FORMATS

EB = {"csa": 32, "hca": 1}
RATE = {"csa": 4, "hca": 128}


def flush_case(kind, rows, tokens_per_row, closing, families, cache_format, *, layers):
    """A layer type's arrays and one call; `closing` is "all" or "some", one row in M."""
    fmt, rate, key = CACHE_FORMATS[cache_format], RATE[kind], jax.random.key(0)
    dims = {"main": C, "index": IC}
    codecs = {"main": fmt.entry, "index": fmt.index_key}
    num_tokens = rows * tokens_per_row
    row = np.repeat(np.arange(rows), tokens_per_row)
    if tokens_per_row == 1:
        behind = np.arange(rows) if closing == "some" else np.zeros(rows, np.int64)
        lengths = 8192 + (rate - 1 - behind) % rate
    else:
        lengths = np.zeros(rows, np.int64)
    positions = lengths[row] + np.arange(num_tokens) % tokens_per_row
    closes = np.flatnonzero((positions + 1) % rate == 0)
    size = min(num_tokens, num_tokens // rate + rows)
    padded = np.where((positions + 1) % rate == 0, np.arange(num_tokens), -1)
    if size < num_tokens:
        padded = np.pad(closes, (0, size - len(closes)), constant_values=-1)
    blocks = int(positions.max()) // 128 + 1
    table = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    call = {
        "closing": padded,
        "request_ids": row,
        "slots": row,
        "positions": positions,
        "lengths": lengths[row],
    }
    call = {name: jnp.asarray(array, jnp.int32) for name, array in call.items()}
    lead = (layers, rows * blocks, EB[kind])
    pools = [zero_planes(codecs[f], dims[f], lead) for f in families]
    width = 2 if kind == "csa" else 1
    new = [
        [projections(key, (num_tokens,), width * dims[f]) for f in families] for _ in range(layers)
    ]
    if kind == "csa":
        states = [projections(key, (layers, rows, 2 * rate), 2 * dims[f]) for f in families]
    else:
        states = jnp.ones((layers, rows, 3, C))
    shared = {
        "states": states,
        "norms": [jnp.ones(dims[f], jnp.bfloat16) for f in families],
        "frequencies": jnp.asarray(160000.0 ** -(np.arange(ROPE // 2) / (ROPE // 2)), jnp.float32),
        "table": jnp.asarray(table, jnp.int32),
        "call": call,
    }
    num_bytes = 0
    for family in families:
        first = np.maximum(positions[closes] - (2 * rate if kind == "csa" else rate) + 1, 0)
        pooled = int(np.sum(positions[closes] + 1 - first))
        if kind == "hca" and tokens_per_row == 1:
            pooled = 2.5 * len(closes)  # the running pool's three rows, and a token
        entry = fmt.entry_bytes(C, ROPE) if family == "main" else fmt.index_key_bytes(IC)
        num_bytes += pooled * dims[family] * 8 + len(closes) * entry
    return tuple(pools), shared, new, int(num_bytes)


def flush_step(
    pools, shared, rows, layer, *, kind, families, cache_format, max_count, backend=None
):
    fmt = CACHE_FORMATS[cache_format]
    codecs = {"main": fmt.entry, "index": fmt.index_key}
    common = shared["call"] | {"layer": layer, "rate": RATE[kind], "eps": 1e-6}
    if kind == "csa":
        return pk.flush_csa(
            pools,
            shared["states"],
            rows,
            shared["norms"],
            shared["frequencies"],
            shared["table"],
            codecs=[codecs[f] for f in families],
            backend=backend,
            **common,
        )
    (pool,), (new,), (norm,) = pools, rows, shared["norms"]
    pool = pk.flush_hca(
        pool,
        shared["states"],
        new,
        norm,
        shared["frequencies"],
        shared["table"],
        codec=codecs["main"],
        max_count=max_count,
        backend=backend,
        **common,
    )
    return (pool,)


def measure(kind, rows, tokens_per_row, closing, families, cache_format="fp8_ue8m0", backend=None):
    layers = 20 if tokens_per_row == 1 else 4
    *case, num_bytes = flush_case(
        kind, rows, tokens_per_row, closing, families, cache_format, layers=layers
    )
    step = functools.partial(
        flush_step,
        kind=kind,
        families=families,
        cache_format=cache_format,
        max_count=tokens_per_row,
        backend=backend,
    )
    times = device_time_us(step, *case)
    return {
        "op": f"flush {kind} {'+'.join(families)} {closing}",
        "rows": rows,
        "tokens": rows * tokens_per_row,
        "format": cache_format,
        "bytes": num_bytes,
        "share_of_copy": num_bytes / times["time_us"] / COPY_BYTES_PER_US,
        "share_after_launch": num_bytes / max(times["time_us"] - 3.0, 0.1) / COPY_BYTES_PER_US,
    } | times


CASES = [
    (kind, rows, 1, closing, families)
    for kind, families in (("csa", ("main", "index")), ("hca", ("main",)))
    for rows in (1, 8, 64, 256)
    for closing in ("all", "some")
    if rows > 1 or closing == "all"
] + [
    (kind, 1, tokens, "all", families)
    for kind, families in (
        ("csa", ("main",)),
        ("csa", ("index",)),
        ("csa", ("main", "index")),
        ("hca", ("main",)),
    )
    for tokens in (8192, 32768)
]


@pytest.mark.bench
def test_flush(capsys):
    with capsys.disabled():
        print_row(measure("csa", 64, 1, "all", ("main", "index")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="bench_compress.json")
    arguments = parser.parse_args()
    results = []
    for case in CASES:
        results.append(measure(*case))
        print_row(results[-1])
    report(results, arguments.json)


if __name__ == "__main__":
    main()
