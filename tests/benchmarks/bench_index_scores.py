"""Index scores, and scores with the selection: `python -m benchmarks.bench_index_scores [results]`.

Keys of MXFP4 and FP8, all visible, blocks of 32 in any order, queries already quantised. With
`--rival DIR`, a folder that holds vLLM's `deep_gemm` package, DeepGEMM's paged FP8 logits are timed
on the same GPU; with `--topk SO` too, vLLM's top-k after them.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp

from benchmarks import bench_topk, harness, rivals
from pallas_kernels import get_cache_format
from pallas_kernels.index_topk import scores_mosaic_gpu, select_mosaic_gpu

HEADS, DIM, EB, K = 64, 128, 32, 512
FORMATS = {"MXFP4": "fp8_ue8m0", "FP8": "fp8_ue8m0_fp8_index"}
BYTES = {"MXFP4": 68, "FP8": 132}
NUM_INPUTS = 3
FLOPS = 1600e12
RIVAL = "DeepGEMM fp8_paged_mqa_logits"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON to keep the rows in")
    parser.add_argument("--rival", help="folder of deep_gemm; without it only ours is timed")
    parser.add_argument("--topk", help="vLLM's library, for its top-k")
    args = parser.parse_args()
    bandwidth = harness.copy_bandwidth()
    rival = load_rival(args.rival) if args.rival else None
    rival_topk = bench_topk.load_rival(args.topk) if args.topk else None
    rows = []
    for batch, num_entries in bench_topk.SHAPES:
        rival_us = rival(batch, num_entries) if rival else None
        both_us = rival_us
        if rival_us is not None and rival_topk is not None:
            both_us = round(rival_us + rival_topk(batch, num_entries, K), 2)
        for keys in FORMATS:
            size = batch * num_entries
            limit = max(size * (BYTES[keys] + 4) / bandwidth, 2 * size * HEADS * DIM / FLOPS)
            calls, codec = inputs(keys, batch, num_entries), codec_of(keys)
            for op, function, theirs in (
                ("index_scores", score, rival_us),
                ("index_topk", score_and_select, both_us),
            ):
                rows.append(
                    harness.row(
                        f"{op} {keys}",
                        f"{batch} x {num_entries}",
                        harness.median_us(jax.jit(functools.partial(function, codec)), calls),
                        rival=RIVAL + (" + topk" if op == "index_topk" else "") if rival else None,
                        rival_us=theirs,
                        limit_us=limit * 1e6,
                    )
                )
    harness.report(rows, args.results)


def codec_of(keys):
    return get_cache_format(FORMATS[keys]).index_key


def score(codec, arguments, **options):
    return scores_mosaic_gpu.index_scores(**arguments, codec=codec, **options)


def score_and_select(codec, arguments):
    scores = score(codec, arguments)
    return select_mosaic_gpu.select_top_k(scores, arguments["visible"], K)


def inputs(keys, batch, num_entries):
    """Three calls: different queries of the same keys."""
    logical = num_entries // EB
    key = jax.random.key(num_entries)
    table = jax.random.permutation(key, batch * logical).astype(jnp.int32).reshape(batch, logical)
    cache = {
        "pool": key_planes(key, keys, batch * logical),
        "block_table": table,
        "request_ids": jnp.arange(batch, dtype=jnp.int32),
        "visible": jnp.full(batch, num_entries, jnp.int32),
        "layer": jnp.int32(0),
    }

    def call(seed):
        keys = jax.random.split(jax.random.key(seed), 2)
        queries = jax.random.normal(keys[0], (batch, HEADS, DIM), jnp.bfloat16)
        weights = jax.random.normal(keys[1], (batch, HEADS))
        return ({"queries": queries.astype(jnp.float8_e4m3fn), "weights": weights} | cache,)

    return [call(seed) for seed in range(NUM_INPUTS)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def key_planes(key, keys, num_blocks):
    """Codes of normal values, scales of 1/4 to 2."""
    first, second = jax.random.split(key)
    if keys == "MXFP4":
        codes = jax.random.bits(first, (1, num_blocks, EB, DIM // 2), jnp.uint8)
        scale = jax.random.randint(second, (1, num_blocks, EB, DIM // 32), 125, 129, jnp.uint8)
    else:
        values = jax.random.normal(first, (1, num_blocks, EB, DIM), jnp.bfloat16)
        codes = jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)
        scale = jnp.exp2(jax.random.randint(second, (1, num_blocks, EB), -2, 2).astype(jnp.float32))
    return {"codes": codes, "scale": scale}


def load_rival(folder):
    """A function (requests, entries) -> median us of a call."""
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
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, page, 132)

        def call():
            queries = torch.randn(batch, 1, HEADS, DIM, **device).to(torch.float8_e4m3fn)
            weights = torch.randn(batch, HEADS, **device)
            return lambda: deep_gemm.fp8_fp4_paged_mqa_logits(
                (queries, None), pages, weights, lengths, table, plan, num_entries
            )

        return rivals.median_us([call() for _ in range(NUM_INPUTS)])

    return time_us


if __name__ == "__main__":
    main()
