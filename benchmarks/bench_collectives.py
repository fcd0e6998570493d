"""Each collective of a step alone: `python -m benchmarks.bench_collectives [--json FILE]`.

A mesh of all devices, first along `model` and then along `data`, with V4-Flash's sizes. A program
runs a collective many times in a row, each on what the last one gave, with a small kernel between
two, so that a launch is seen as in a step. Prints for each: us a turn, and of the collective alone
as the profiler sees it (the median and the least of all launches); the bytes that a device sends,
and what they take at 450 GB/s. A least-squares line through the sums of all sizes is a latency
and a rate, which `dsv4-jax plan --collective-us` and `bench/floor.py` assume as 6 us and 450 GB/s.

Those of a layer go through peer buffers, others by NCCL; `DSV4_JAX_PEER_BUFFERS=0` leaves all to
it. XLA's command buffers change what a launch costs; `XLA_FLAGS` chooses them.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dsv4_jax as ds
from benchmarks.cases.collectives import CONTEXT, ROWS
from dsv4_jax import collectives as dm
from dsv4_jax.bench.floor import COLLECTIVE_S, LINK_BANDWIDTH, split_collectives, step_collectives
from dsv4_jax.bench.profile import read_events
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.mesh import BY_DEVICE
from dsv4_jax.peers import make_peer_buffers, using

TURNS = 32
_COLLECTIVE = re.compile(r"nccl|peers|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all", re.I)


def half(x):
    """A small kernel between two collectives; values stay finite."""
    return x * jnp.asarray(0.5, x.dtype)


def sum_rows(x):
    """A sum over `model`, after attention and after the experts: [T, D]."""
    return half(dm.sum_over_model(x))


def queries(x):
    """The gather of queries of all heads where a cache is split: [T, H / n, C]."""
    (parts,) = dm.gather_in_one(x)
    return half(parts[0] + parts[-1])


def queries_and_best(x, scores, numbers):
    """The same with the best entries of each device: f32[T, K] and i32[T, K]."""
    parts, values, entries = dm.gather_in_one(x, scores, numbers)
    return half(parts[0] + parts[-1]), half(values[0] + values[-1]), entries[0] // 2


def sums_of_attention(x):
    """The exchange of sums where a cache is split: f32[n, T, H / n, C + 2]."""
    return half(dm.exchange_over_model(x))


def rows_and_routes(x, experts, shares):
    """The gather of rows with their experts and shares over `data`: [T, D], i32 and f32[T, k]."""
    rows, picked, shared = dm.gather_rows(x, experts, shares)
    own = len(x)
    return half(rows[:own] + rows[-own:]), picked[:own] // 2, half(shared[-own:])


def own_rows(x):
    """The scattered sum over `data`: [data * T, D]."""
    mine = half(dm.sum_own_rows(x))
    return jnp.tile(mine, (len(x) // len(mine), 1))


def cases(config, data, model, rows):
    """(name in `bench/floor.py`, function, what it takes) of a mesh, with `rows` on each shard."""
    dim, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    k, picks = config.indexer_top_k, config.num_experts_per_token
    found = []
    if model > 1:
        own = ((rows, heads // model, width), jnp.bfloat16)
        best = [((rows, k), jnp.float32), ((rows, k), jnp.int32)]
        sums = ((model, rows, heads // model, width + 2), jnp.float32)
        found += [
            ("attention", sum_rows, [((rows, dim), jnp.bfloat16)]),
            ("queries", queries, [own]),
            ("queries and the best entries", queries_and_best, [own, *best]),
            ("sums of attention", sums_of_attention, [sums]),
        ]
    if data > 1:
        routes = [((rows, picks), jnp.int32), ((rows, picks), jnp.float32)]
        found += [
            ("rows and routes", rows_and_routes, [((rows, dim), jnp.bfloat16), *routes]),
            ("experts", own_rows, [((data * rows, dim), jnp.bfloat16)]),
        ]
    return found


def sent_bytes(config, data, model, rows):
    """{name: bytes that a device sends}, as the floor counts them."""
    found = step_collectives(config, data=data, model=model, rows=rows)
    found += split_collectives(config, model=model, rows=rows, context=CONTEXT)
    return {one.name: one.sent_bytes for one in found}


def chain(mesh, function, turns):
    """A jitted program that calls the function so many times, each on the last one's results."""

    def run(arguments, peers):
        with using(peers):
            for _ in range(turns):
                results = function(*arguments)
                arguments = results if isinstance(results, tuple) else (results,)
        return arguments

    places = P(), BY_DEVICE
    local = jax.shard_map(run, mesh=mesh, in_specs=places, out_specs=P(), check_vma=False)
    return jax.jit(local, donate_argnums=0)


def measure(mesh, peers, function, shapes, *, turns=TURNS):
    """Us of a turn, and of the collective's own launches, if a profiler sees them."""
    where = NamedSharding(mesh, P())
    make = jax.jit(
        lambda: tuple(jnp.ones(shape, dtype) for shape, dtype in shapes), out_shardings=where
    )
    compiled = chain(mesh, function, turns).lower(make(), peers).compile()
    program = functools.partial(_call, compiled, peers)
    timing, state = time_calls(program, make(), max_calls=32, least_s=0.03, repeats=5)
    row = {"us": timing.median_s / turns * 1e6, "us_least": timing.least_s / turns * 1e6}
    launches = kernel_times(program, state)
    if launches:
        row |= {"kernel_us": statistics.median(launches), "kernel_us_least": min(launches)}
        row["kernels_a_turn"] = len(launches) / turns / mesh.size
    return row


def _call(compiled, peers, state):
    return compiled(state, peers)


def kernel_times(program, state):
    """Us of every launch of a collective in one call, on all devices; the profiler may see none."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(state))
        files = pathlib.Path(folder).rglob("*.xplane.pb")
        events = [event for file in files for event in read_events(file.read_bytes())]
    return [us for name, us in events if _COLLECTIVE.search(name)]


def fit(rows, key):
    """Latency in us and GB/s of the line that is nearest to us against bytes, in relative terms."""
    points = np.array([(row["bytes"], row[key]) for row in rows if key in row])
    if len(points) < 2:
        return None
    left = np.stack([np.ones(len(points)), points[:, 0]], axis=1) / points[:, 1:]
    (latency, slope), *_ = np.linalg.lstsq(left, np.ones(len(points)), rcond=None)
    return {"latency_us": latency, "GB_per_s": 1e-3 / slope if slope > 0 else None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="flash", help="a preset")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of a data shard")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    ds.runtime.claim_memory(0.3, at_once=False)
    ds.set_xla_flags()
    ds.use_compilation_cache()
    config = getattr(ds.DSV4Config, args.config)()
    devices, rows = jax.devices(), []
    flags = os.environ["XLA_FLAGS"]
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}, {flags}", flush=True)
    names = ("bytes sent", "us at 450 GB/s", "us a turn", "us alone", "least")
    print("collective".ljust(44) + "".join(name.rjust(16) for name in names), flush=True)
    for data, model in ((1, len(devices)), (len(devices), 1)):
        mesh = ds.make_mesh(data, model)
        peers = make_peer_buffers(mesh)
        for count in args.rows:
            sent = sent_bytes(config, data, model, count)
            for name, function, shapes in cases(config, data, model, count):
                size = sent[name]
                row = {"data": data, "model": model, "rows": count, "name": name, "bytes": size}
                row["link_us"] = size / LINK_BANDWIDTH * 1e6
                try:
                    row |= measure(mesh, peers, function, shapes, turns=args.turns)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:300]
                rows.append(row)
                print(line_of(row), flush=True)
                keep(args.json, flags, rows)
    for name in dict.fromkeys(row["name"] for row in rows):
        for key in ("us", "kernel_us", "kernel_us_least"):
            if found := fit([row for row in rows if row["name"] == name], key):
                print(json.dumps({"fit": name, "of": key} | found), flush=True)
    print(f"the floor takes {COLLECTIVE_S * 1e6:.0f} us each and {LINK_BANDWIDTH / 1e9:.0f} GB/s")
    return int(any("failed" in row for row in rows))


def line_of(row):
    """A collective as a line of the table."""
    title = f"{row['data']}x{row['model']} {row['rows']:>4} rows, {row['name']}".ljust(44)
    if "failed" in row:
        return f"{title} failed, {row['failed']}"
    cells = [f"{row['bytes']:,.0f}", f"{row['link_us']:.2f}", f"{row['us']:.2f}"]
    cells += [f"{row[key]:.2f}" if key in row else "-" for key in ("kernel_us", "kernel_us_least")]
    return title + "".join(cell.rjust(16) for cell in cells)


def keep(path, flags, rows):
    """Writes what there is so far."""
    if path:
        found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "flags": flags}
        path.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
