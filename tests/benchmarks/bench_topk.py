"""Selection of the K best against vLLM's: `python -m benchmarks.bench_topk [results] [--rival so]`.

Scores are normal, all visible, and lie in the L2 cache as they do just after they were computed.
The rival is the op `persistent_topk` of vLLM's `_C_stable_libtorch.abi3.so`, called through torch
and replayed from a CUDA graph; it gives its indices in no order.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks import harness, rivals
from pallas_kernels.index_topk.select_op import select_top_k

SHAPES = [(1, 262144), (8, 65536), (8, 262144), (32, 16384), (64, 4096), (64, 16384), (64, 65536)]
SELECTED = [512, 1024]
RIVAL = "vLLM persistent_topk"
_CACHED_BYTES = 40e6
_WORKSPACE_BYTES = 64 << 20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON to keep the rows in")
    parser.add_argument("--rival", help="vLLM's library; without it only ours is timed")
    args = parser.parse_args()
    bandwidth = harness.copy_bandwidth()
    time_rival = load_rival(args.rival) if args.rival else None
    rows = []
    for k in SELECTED:
        for shape in SHAPES:
            ours_us = harness.median_us(
                jax.jit(functools.partial(select_top_k, k=k)), inputs(*shape), rounds=20
            )
            rows.append(
                harness.row(
                    "select_top_k",
                    f"{k} of {shape[0]} x {shape[1]}",
                    ours_us,
                    rival=RIVAL if time_rival else None,
                    rival_us=time_rival(*shape, k) if time_rival else None,
                    limit_us=4 * shape[0] * shape[1] / bandwidth * 1e6,
                )
            )
    harness.report(rows, args.results)


def inputs(num_rows, num_entries):
    """Two to four different calls whose scores fit the L2 cache together."""
    count = max(2, min(4, int(_CACHED_BYTES / (4 * num_rows * num_entries))))
    visible = jnp.full(num_rows, num_entries, jnp.int32)
    shape = (num_rows, num_entries)
    return [(jax.random.normal(jax.random.key(seed), shape), visible) for seed in range(count)]


def load_rival(library):
    """A function (rows, entries, k) -> median us of a call, of as many different ones as ours."""
    import torch

    torch.ops.load_library(library)

    def time_us(num_rows, num_entries, k):
        device = {"device": "cuda", "dtype": torch.int32}
        scores = [torch.from_dlpack(scores) for scores, _ in inputs(num_rows, num_entries)]
        lengths = torch.full((num_rows,), num_entries, **device)
        selected = torch.empty(num_rows, k, **device)
        workspace = torch.zeros(_WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)

        return rivals.median_us(
            [
                functools.partial(
                    torch.ops._C.persistent_topk, x, lengths, selected, workspace, k, num_entries
                )
                for x in scores
            ]
        )

    return time_us


if __name__ == "__main__":
    main()
