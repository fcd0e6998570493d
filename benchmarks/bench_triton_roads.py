"""The same Triton kernels by each lowering: Pallas's backend, PTX, Triton's IR, `jax_triton`.

    python -m benchmarks.bench_triton_roads results.json [--only NAME] [--lowerings pallas,ptx]

Each lowering has a process of its own. All compile at once, then each times its loops alone. A loop
goes through calls on different inputs, a round of them is one CUDA graph, and microseconds are of
one launch among them: `serial` where each waits for the one before, `concurrent` where XLA may let
neighbours overlap that share no array. `equal` says of each lowering whether all results have the
bits of Pallas's. `update_us` is of a host that hands over a graph of launches: `same`, on the same
arrays, and `other`, on two sets of them in turns, so that addresses in the graph change.
"""

import argparse
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks import bench_many_tokens, layer_calls
from benchmarks.cases import cache, lowerings
from benchmarks.cases.tokens import DIM, EXPERTS, JOINED, PICKS, POSITIONS, SCALING, VOCAB
from dsv4_jax.bench.loops import loop_over
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.results import command_line, describe_device, write_json
from dsv4_jax.bench.timing import dispatch, time_calls
from pallas_kernels.gpu import triton_lowering
from pallas_kernels.pick_experts.op import router_logits

LOWERINGS = ("pallas", "ptx", "ir", "jax_triton")
LAYERS, ROUND_US = 20, 3000.0
"""Calls of a round, and what a loop takes at least if a launch takes 3 us."""
LOOP_ROUNDS = int(ROUND_US / (3 * LAYERS))
LIMIT_S = 110
"""No process begins to compile another case later than this."""
MODES = {"serial": "SERIALIZE", "concurrent": "CONCURRENT"}


def drawn(shapes, make):
    """A call's inputs, as often as a round has calls; each from a key of its own."""
    keys = jax.random.split(jax.random.key(0), LAYERS * len(shapes)).reshape(LAYERS, len(shapes))
    return None, [
        tuple(make(k, *shape) for k, shape in zip(row, shapes, strict=True)) for row in keys
    ]


def normal(key, shape, dtype=jnp.float32):
    if dtype == jnp.int32:
        return jnp.arange(shape[0], dtype=dtype)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def appends(kind, batch):
    """One layer of a decode step of so many requests."""
    function = functools.partial(layer_calls.append_and_flush, kind=kind)
    shape = kind, batch, "all", cache.HEADS
    return function, lambda: layer_calls.append_and_flush_case(*shape, layers=LAYERS)


def flushes(kind, num_tokens):
    """Flushes of a prompt's first tokens."""
    families = ("main",)
    function = functools.partial(layer_calls.flush, kind=kind, families=families)
    return function, lambda: layer_calls.flush_case(kind, families, num_tokens, layers=LAYERS)


def form_of_few(rows, tokens):
    """An op of `bench_many_tokens`, by its kernel for few tokens."""
    _, forms, given = rows(tokens)
    return forms["few"], lambda: (None, [tuple(jnp.copy(a) for a in given) for _ in range(LAYERS)])


def picks(tokens):
    """Flash's experts."""
    return _pick, lambda: drawn([((tokens, EXPERTS),), ((EXPERTS,),)], normal)


def _pick(logits, bias):
    static = {"count": PICKS, "scaling": SCALING, "backend": "triton_gpu"}
    return pk.pick_experts(logits, bias=bias, **static)


def logits(tokens):
    """The router's product."""
    function = functools.partial(router_logits, backend="triton_gpu")
    shapes = [((tokens, DIM), jnp.bfloat16), ((EXPERTS, DIM), jnp.bfloat16)]
    return function, lambda: drawn(shapes, normal)


def projections(tokens):
    """Of V4-Flash's compressors and indexer, with the biases of positions."""
    shapes = [((tokens, DIM), jnp.bfloat16), ((tokens,), jnp.int32)]
    shapes += [((width, DIM), jnp.bfloat16) for width in JOINED]
    shapes += [((POSITIONS, width),) for width in JOINED[:-1]]

    def function(x, positions, *arrays):
        weights, biases = list(arrays[: len(JOINED)]), [*arrays[len(JOINED) :], None]
        return pk.joined_linears(x, weights, biases, positions, backend="triton_gpu")

    return function, lambda: drawn(shapes, normal)


def rounds_queries(tokens):
    """Of all index heads."""
    function = functools.partial(
        pk.round_index_queries, codec=layer_calls.FORMAT.index_key, backend="triton_gpu"
    )
    queries = (tokens, cache.INDEX_HEADS, cache.IC), jnp.bfloat16
    shapes = [queries, ((cache.ROPE // 2,),), ((tokens,), jnp.int32)]
    return function, lambda: drawn(shapes, normal)


def limits(rows):
    """Top-k and top-p of V4's vocabulary."""

    def function(scaled):
        top_k, top_p = jnp.full(rows, 50, jnp.int32), jnp.full(rows, 0.9, jnp.float32)
        return pk.limit_tokens(scaled, top_k, top_p, backend="triton_gpu")

    return function, lambda: drawn([((rows, VOCAB),)], normal)


OPS = {
    "hyper_connections": functools.partial(form_of_few, bench_many_tokens.streams_read),
    "write_streams": functools.partial(form_of_few, bench_many_tokens.streams_written),
    "pick_experts": picks,
    "router_logits": logits,
    "round_index_queries": rounds_queries,
    "joined_linears": projections,
    "limit_tokens": limits,
    "flush hca": functools.partial(flushes, "hca"),
    "append_and_flush hca": functools.partial(appends, "hca"),
    "append_and_flush csa": functools.partial(appends, "csa"),
}
CASES = {
    op if op in lowerings.NAMED_BY_OP else f"{op} {tokens}": functools.partial(OPS[op], tokens)
    for op, tokens in lowerings.TIMED
}
SMALLEST = "hyper_connections 1"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=pathlib.Path)
    parser.add_argument("--only", help="cases whose names begin so")
    parser.add_argument("--lowerings", default=LOWERINGS, type=lambda t: tuple(t.split(",")))
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [name for name in CASES if name.startswith(args.only or "")]
    if args.measure:
        return measure(names)
    began = time.perf_counter()
    found = run_each(args.lowerings, args.only)
    report = compared(found, names) | {"command": command_line()}
    report["seconds"] = round(time.perf_counter() - began, 1)
    for row in report["cases"]:
        print(json.dumps(row))
    print(json.dumps(report["update_us"]), json.dumps(report["failed"]))
    if args.results:
        write_json(args.results, report)
    return 1 if report["failed"] else 0


def run_each(lowerings, only):
    """{lowering: what its process says}; they compile at once, and time one after the other."""
    processes, chosen = {}, ["--only", only] if only else []
    for name in lowerings:
        settings = {
            triton_lowering.LOWERING_VARIABLE: name,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        processes[name] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_triton_roads", "--measure", *chosen],
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    ready = {name: process.stdout.readline() for name, process in processes.items()}
    print({name: line.strip() for name, line in ready.items()}, flush=True)
    found = {}
    for name, process in processes.items():
        if process.poll() is None:
            process.stdin.write("go\n")
            process.stdin.flush()
        lines = process.stdout.read().splitlines()
        found[name] = json.loads(lines[-1]) if lines else {"died": process.wait()}
        print(name, "done", flush=True)
    return found


def measure(names):
    """Compiles, waits for its turn, times, and prints JSON as the last line."""
    began, compiled, rows = time.perf_counter(), {}, {}
    for name in names:
        if time.perf_counter() - began > LIMIT_S:
            rows[name] = {"failed": f"not begun within {LIMIT_S} s"}
            continue
        try:
            compiled[name], rows[name] = prepare(name)
        except Exception as error:
            rows[name] = {"failed": first_line(error)}
        print(name, f"{time.perf_counter() - began:.0f} s", rows[name], file=sys.stderr, flush=True)
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
    sys.stdin.readline()
    for name, (programs, state, inputs) in compiled.items():
        try:
            rows[name] |= timed(programs, state, inputs)
        except Exception as error:
            rows[name]["failed"] = first_line(error)
    if SMALLEST in compiled:
        rows[SMALLEST]["update_us"] = updates()
    rows["device"] = describe_device()
    print(json.dumps(rows), flush=True)
    return 0


def prepare(name):
    """The loops of a case, compiled, and what its first run gave."""
    function, make = CASES[name]()
    state, inputs = make()
    row, programs = {}, {}
    for mode, setting in MODES.items():
        if state is not None and mode == "concurrent":
            continue
        run = jax.jit(
            loop_over(function, has_state=state is not None),
            static_argnums=0,
            donate_argnums=1,
            compiler_options={"xla_gpu_command_buffer_scheduling_mode": setting},
        )
        start = time.perf_counter()
        lowered = run.lower(LOOP_ROUNDS, state, inputs)
        lowered_at = time.perf_counter()
        programs[mode] = lowered.compile()
        if mode == "serial":
            row["lower_s"] = round(lowered_at - start, 2)
            row["compile_s"] = round(time.perf_counter() - lowered_at, 2)
            given = None if state is None else jax.tree.map(jnp.copy, state)
            program = programs[mode]
            taken, results = dispatch(lambda c, run=program: run(c, inputs), given, 1)
            row["first_run_s"] = round(taken, 2)
            row["results"] = digest(results)
    return (programs, state, inputs), row


def digest(results):
    """Of the bits of all arrays."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(results):
        total.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data)
    return total.hexdigest()[:16]


def timed(programs, state, inputs):
    """Microseconds of a launch in each loop."""
    found = {}
    for mode, program in programs.items():
        carry = (None, None if state is None else jax.tree.map(jnp.copy, state), None)
        timing, _ = time_calls(
            lambda c, program=program: program(c[1], inputs), carry, least_s=0.02, repeats=5
        )
        found[mode] = round(timing.median_s / (LOOP_ROUNDS * len(inputs)) * 1e6, 3)
    return {"us": found}


def updates(calls=200):
    """Microseconds of a call of one graph of launches, on the same arrays or on others in turns."""
    function, make = CASES[SMALLEST]()
    sets = [make()[1] for _ in range(2)]
    run = jax.jit(lambda inputs: [function(*args) for args in inputs])
    found = {}
    for name, count in (("same", 1), ("other", 2), ("same again", 1)):
        turns = itertools.cycle(sets[:count])
        for _ in range(6):  # each waited for, until graphs of both sets are there
            dispatch(lambda _, turns=turns: run(next(turns)), None, 1)
        taken, _ = dispatch(lambda _, turns=turns: run(next(turns)), None, calls)
        found[name] = round(taken / calls * 1e6, 1)
    return found


def compared(found, names):
    """Rows of all lowerings, beside each other."""
    cases, failed = [], {}
    for case in names:
        rows = {name: rows.get(case, {"failed": "died"}) for name, rows in found.items()}
        failed |= {f"{n}: {case}": r["failed"] for n, r in rows.items() if "failed" in r}
        row = {"case": case}
        for mode in MODES:
            row[f"{mode}_us"] = {n: r["us"].get(mode) for n, r in rows.items() if "us" in r}
        for key in ("lower_s", "compile_s", "first_run_s"):
            row[key] = {n: r.get(key) for n, r in rows.items()}
        expected = rows.get("pallas", {}).get("results")
        if expected is not None:
            row["equal"] = {n: r.get("results") == expected for n, r in rows.items()}
        cases.append(row)
    update = {n: rows.get(SMALLEST, {}).get("update_us") for n, rows in found.items()}
    device = next((rows["device"] for rows in found.values() if "device" in rows), None)
    versions = {p: version(p) for p in ("jax", "jaxlib", "triton", "jax-triton")}
    return {
        "device": device,
        "versions": versions,
        "cases": cases,
        "update_us": update,
        "failed": failed,
    }


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def names_of_newer_triton():
    """jax-triton 0.4.1 takes names of Triton 3.7, which kernels of plain pointers never use."""
    try:
        from triton.backends.nvidia import driver
    except ImportError:
        return mock.MagicMock()
    missing = {"TMA_DTYPE_DEVICE_TO_HOST": {}, "TMA_TF32": 0}
    kept = {name: getattr(driver, name, value) for name, value in missing.items()}
    return mock.patch.multiple(driver, create=True, **kept)


if __name__ == "__main__":
    with names_of_newer_triton():
        raise SystemExit(main())
