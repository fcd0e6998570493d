"""Times tilings against the formula's, and keeps those that beat it: `python -m benchmarks.tune`.

Prefill flushes of the released sizes. Every candidate must leave the bytes that the formula leaves.
With `--write`, what is faster by 3 % goes to the device's file in `pallas_kernels/data/tilings`, in
place of what that says of the same shapes.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib

import jax
import numpy as np

import pallas_kernels
from benchmarks import harness, layer_calls
from pallas_kernels import tilings
from pallas_kernels.flush_write import triton_gpu
from pallas_kernels.flush_write.tiling import Tiling, choose_csa, choose_hca

FOLDER = pathlib.Path(pallas_kernels.__file__).parent / "data" / "tilings"
LAYERS = 4
GAIN = 0.97
FLUSHES = {"flush_csa": triton_gpu.flush_csa, "flush_hca": triton_gpu.flush_hca}
FORMULAS = {"flush_csa": choose_csa, "flush_hca": choose_hca}
CANDIDATES = {
    "flush_csa": [
        Tiling(warps=4, apart=True),
        Tiling(warps=8),
        Tiling(warps=8, apart=True),
        Tiling(warps=4, apart=True, programs=132 * 2),
        Tiling(warps=8, apart=True, programs=132 * 2),
        Tiling(warps=4, apart=True, channels=512, pool_warps=4),
        Tiling(warps=4, apart=True, channels=128, pool_warps=1),
        Tiling(warps=4, apart=True, channels=256, pool_warps=2),
    ],
    "flush_hca": [
        Tiling(warps=8, chunk=16),
        Tiling(warps=8, chunk=8),
        Tiling(warps=16, chunk=16),
        Tiling(warps=8, channels=256, pool_warps=4, chunk=16),
        Tiling(warps=8, channels=128, pool_warps=4, chunk=16),
        Tiling(warps=8, channels=128, pool_warps=4, chunk=32),
        Tiling(warps=8, channels=128, pool_warps=2, chunk=16),
        Tiling(warps=8, channels=64, pool_warps=2, chunk=16),
        Tiling(warps=8, channels=64, pool_warps=2, chunk=32),
        Tiling(warps=8, channels=32, pool_warps=1, chunk=32),
    ],
}
SHAPES = [
    ("flush_csa", ("main", "index"), 8192),
    ("flush_csa", ("main",), 8192),
    ("flush_csa", ("index",), 8192),
    ("flush_csa", ("main", "index"), 32768),
    ("flush_hca", ("main",), 8192),
    ("flush_hca", ("main",), 32768),
]
"""Op, compressors, tokens; of a CSA layer only both together are kept."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=list(FLUSHES))
    parser.add_argument("--tokens", type=int, help="only shapes of that many tokens")
    args = parser.parse_args()
    bandwidth, found = harness.copy_bandwidth(), []
    print(f"copy {bandwidth / 1e9:.0f} GB/s")
    for op, families, tokens in SHAPES:
        if args.only in (None, op) and args.tokens in (None, tokens):
            entry = tune(op, families, tokens, bandwidth)
            if entry is not None and (op == "flush_hca" or len(families) == 2):
                found.append(entry)
    if args.write and found:
        write(jax.devices()[0].device_kind, found)


def tune(op, families, tokens, bandwidth):
    """The best candidate that beats the formula, as an entry; None if none does."""
    kind = op.removeprefix("flush_")
    pools, inputs, num_bytes = layer_calls.flush_case(kind, families, tokens, layers=LAYERS)
    windows = inputs[0][3]["closing"].shape[0]
    formula = dataclasses.replace(FORMULAS[op](windows, tokens))
    run = functools.partial(layer_calls.flush, kind=kind, families=families)
    limit = num_bytes / bandwidth * 1e6
    print(f"{op} {'+'.join(families)} {tokens} tokens: {limit:.1f} us of copying", flush=True)

    def measure(tiling):
        flush = functools.partial(run, run=functools.partial(FLUSHES[op], tiling=tiling))
        stored = jax.tree.map(np.asarray, jax.jit(flush)(pools, *inputs[0])[0])
        us = harness.median_us(flush, inputs, state=pools, rounds=5)
        share = limit / max(us - 3.0, 0.1)
        print(f"  {us:8.2f} us, {share:.0%} of copying after 3 us  {tiling}", flush=True)
        return us, stored

    formula_us, expected = measure(formula)
    best_us, best = formula_us, None
    for tiling in CANDIDATES[op]:
        if tiling == formula:
            continue
        us, stored = measure(tiling)
        jax.tree.map(np.testing.assert_array_equal, _bytes(stored), _bytes(expected))
        if us < min(best_us, GAIN * formula_us):
            best_us, best = us, tiling
    if best is None:
        return None
    fields = dataclasses.asdict(best)
    changed = {name: v for name, v in fields.items() if v != getattr(formula, name)}
    return {
        "op": op,
        "shape": {"windows": windows, "tokens": tokens},
        "tiling": changed,
        "us": round(best_us, 2),
        "formula_us": round(formula_us, 2),
    }


def write(device, entries, folder=FOLDER):
    """Puts entries in place of those of the same op and class."""
    path = pathlib.Path(folder) / tilings.file_name(device)
    old = json.loads(path.read_text())["entries"] if path.exists() else []
    replaced = {_key(entry) for entry in entries}
    kept = [entry for entry in old if _key(entry) not in replaced]
    lines = ",\n  ".join(json.dumps(entry) for entry in sorted(kept + entries, key=_key))
    head = {"jax": jax.__version__, "date": datetime.date.today().isoformat()}
    text = json.dumps(head)[:-1] + f', "entries": [\n  {lines}\n]}}\n'
    tilings.parse(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _key(entry):
    return entry["op"], tilings.classify(entry["shape"])


def _bytes(planes):
    return jax.tree.map(lambda a: np.ascontiguousarray(a).view(np.uint8), planes)


if __name__ == "__main__":
    main()
