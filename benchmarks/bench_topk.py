"""Selection of the K best scores beside vLLM's: `python -m benchmarks.bench_topk [results]`.

Scores are normal, all visible, and lie in the L2 cache, as they do just after they were computed.
With `--baseline SO`, vLLM's `_C_stable_libtorch.abi3.so`, its op `persistent_topk` is called from
torch and replayed from a CUDA graph; it returns its indices in no particular order.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import baselines
from benchmarks.cases.selection import SELECTED, SHAPES
from dsv4_jax.bench import compare, timing
from pallas_kernels.gpu.devices import H200
from pallas_kernels.select_top_k.op import select_top_k

BASELINE = "vLLM persistent_topk"
_CACHED_BYTES = 0.8 * H200.l2_bytes
_WORKSPACE_BYTES = 64 << 20


def main():
    args = baselines.make_parser(__doc__, "vLLM's library").parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [case(shape, k, bandwidth, args.baseline) for k in SELECTED for shape in SHAPES]
    return compare.measure(cases, args.results)


def case(shape, k, bandwidth, library):
    """One row; `shape` is (requests, entries of each)."""
    return compare.Case(
        "select_top_k",
        f"{k} of {shape[0]} x {shape[1]}",
        jax.jit(functools.partial(select_top_k, k=k)),
        lambda: (None, inputs(*shape)),
        roofline_us=4 * shape[0] * shape[1] / bandwidth * 1e6,
        rounds=20,
        baseline=BASELINE if library else None,
        baseline_us=(lambda: load_baseline(library)(*shape, k)) if library else None,
    )


def inputs(num_rows, num_entries):
    """Two to four different calls whose scores together fit the L2 cache."""
    count = max(2, min(4, int(_CACHED_BYTES / (4 * num_rows * num_entries))))
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((count, num_rows, num_entries), np.float32)  # none repeated
    visible = jnp.asarray(np.full(num_rows, num_entries, np.int32))
    return [(jnp.asarray(each), visible) for each in scores]


@functools.cache
def load_baseline(library):
    """Returns a function (rows, entries, k) -> median microseconds of calls with our inputs."""
    import torch

    torch.ops.load_library(library)

    def time_us(num_rows, num_entries, k):
        device = {"device": "cuda", "dtype": torch.int32}
        scores = [torch.from_dlpack(scores) for scores, _ in inputs(num_rows, num_entries)]
        lengths = torch.full((num_rows,), num_entries, **device)
        selected = torch.empty(num_rows, k, **device)
        workspace = torch.zeros(_WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)

        return baselines.median_us(
            [
                functools.partial(
                    torch.ops._C.persistent_topk, x, lengths, selected, workspace, k, num_entries
                )
                for x in scores
            ]
        )

    return time_us


if __name__ == "__main__":
    sys.exit(main())
