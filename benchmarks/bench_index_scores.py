"""Index scores, alone and with the selection: `python -m benchmarks.bench_index_scores [results]`.

Keys are MXFP4 or FP8, all visible, in blocks of 32 in any order, and queries are already quantised.
With `--baseline DIR`, the folder of vLLM's `deep_gemm` package, DeepGEMM's paged FP8 logits are
timed on the same GPU; with `--topk SO` too, vLLM's top-k after them.
"""

import functools
import sys

import jax.numpy as jnp
import numpy as np

from benchmarks import baselines, bench_topk, draws
from benchmarks.cases.selection import DIM, HEADS, SELECTED, SHAPES
from benchmarks.cases.selection import ENTRIES_PER_BLOCK as EB
from dsv4_jax.bench import compare, timing
from dsv4_jax.bench.roofline import FP8_FLOPS
from helpers.calls import make_call
from pallas_kernels import LayerPlanes, get_cache_format
from pallas_kernels.gpu.devices import H200
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.select_top_k import mosaic_gpu as select_kernel

K = SELECTED[0]
FORMATS = {"MXFP4": "fp8_ue8m0", "FP8": "fp8_ue8m0_fp8_index"}
BYTES = {"MXFP4": 68, "FP8": 132}
NUM_INPUTS = 3
BASELINE = "DeepGEMM fp8_paged_mqa_logits"


def main():
    topk = "vLLM's library, for its top-k"
    args = baselines.make_parser(__doc__, "folder of deep_gemm", topk=topk).parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [
        case
        for shape in SHAPES
        for keys in FORMATS
        for case in cases_of(keys, shape, bandwidth, args.baseline, args.topk)
    ]
    return compare.measure(cases, args.results)


def cases_of(keys, shape, bandwidth, folder, library):
    """The rows of scores and of scores with selection; `shape` is (requests, entries of each)."""
    batch, num_entries = shape
    size = batch * num_entries
    limit = max(size * (BYTES[keys] + 4) / bandwidth, 2 * size * HEADS * DIM / FP8_FLOPS)
    for op, function in (("index_scores", score), ("index_topk", score_and_select)):
        topk = library if op == "index_topk" else None
        yield compare.Case(
            f"{op} {keys}",
            f"{batch} x {num_entries}",
            function,
            lambda: (None, inputs(keys, *shape)),
            roofline_us=limit * 1e6,
            baseline=BASELINE + (" + topk" if topk else "") if folder else None,
            baseline_us=functools.partial(baseline_us, folder, topk, *shape) if folder else None,
        )


@functools.cache
def baseline_us(folder, library, batch, num_entries):
    """Microseconds of DeepGEMM's scores and, with vLLM's library, of the selection after them."""
    if library is None:
        return load_baseline(folder)(batch, num_entries)
    topk_us = bench_topk.load_baseline(library)(batch, num_entries, K)
    return round(baseline_us(folder, None, batch, num_entries) + topk_us, 2)


def codec_of(keys):
    return get_cache_format(FORMATS[keys]).index_key


def score(arguments, **options):
    return scores_kernel.index_scores(**arguments, **options)


def score_and_select(arguments):
    scores = score(arguments)
    return select_kernel.select_top_k(scores, arguments["call"].visible, K)


def inputs(keys, batch, num_entries):
    """Three calls with different queries on the same keys."""
    logical = num_entries // EB
    made = draws.make(
        {
            "pool": key_planes(keys, batch * logical),
            "queries": [draws.Draw((batch, HEADS, DIM), jnp.bfloat16)] * NUM_INPUTS,
            "weights": [draws.Draw((batch, HEADS))] * NUM_INPUTS,
        }
    )
    table = draws.blocks(np.random.default_rng(num_entries), batch, logical)
    shared = {
        "pool": LayerPlanes(made["pool"], jnp.int32(0), codec_of(keys)),
        "call": make_call(table, np.arange(batch), visible=np.full(batch, num_entries)),
    }
    return [
        ({"queries": queries, "weights": weights} | shared,)
        for queries, weights in zip(made["queries"], made["weights"], strict=True)
    ]


def key_planes(keys, num_blocks):
    """Draws of codes of normal values and of scales from 1/4 to 2."""
    if keys == "MXFP4":
        codes = draws.Draw((1, num_blocks, EB, DIM // 2), jnp.uint8, among=range(256))
        scale = draws.Draw((1, num_blocks, EB, DIM // 32), jnp.uint8, among=range(125, 129))
    else:
        codes = draws.Draw((1, num_blocks, EB, DIM), jnp.float8_e4m3fn, as_bytes=True)
        scale = draws.Draw((1, num_blocks, EB), among=(0.25, 0.5, 1.0, 2.0))
    return {"codes": codes, "scale": scale}


@functools.cache
def load_baseline(folder):
    """Returns a function (requests, entries) -> median microseconds of a call."""
    sys.path.insert(0, folder)
    import deep_gemm
    import torch

    page = 64

    def time_us(batch, num_entries):
        num_pages = batch * num_entries // page
        device = {"device": "cuda"}
        pages = torch.empty(num_pages, page, 1, DIM + 4, dtype=torch.uint8, **device)
        flat = pages.view(num_pages, page * (DIM + 4))
        values = torch.randn(num_pages, page * DIM, dtype=torch.bfloat16, **device)
        flat[:, : page * DIM] = values.to(torch.float8_e4m3fn).view(torch.uint8)
        flat[:, page * DIM :] = torch.ones(num_pages, page, **device).view(torch.uint8)
        lengths = torch.full((batch, 1), num_entries, dtype=torch.int32, **device)
        table = torch.randperm(num_pages, **device).int().view(batch, -1)
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, page, H200.num_sms)

        def call():
            queries = torch.randn(batch, 1, HEADS, DIM, **device).to(torch.float8_e4m3fn)
            weights = torch.randn(batch, HEADS, **device)
            return lambda: deep_gemm.fp8_fp4_paged_mqa_logits(
                (queries, None), pages, weights, lengths, table, plan, num_entries
            )

        return baselines.median_us([call() for _ in range(NUM_INPUTS)])

    return time_us


if __name__ == "__main__":
    sys.exit(main())
