"""Sparse attention beside FlashMLA's: `python -m benchmarks.bench_sparse_attention [results]`.

Requests of full windows; 512 or 1024 random CSA entries each, or all HCA entries; the released
format. With `--rival SO`, vLLM's `_flashmla_C.abi3.so`, FlashMLA's decode of as many keys, window
and extra cache, is timed on the same GPU through torch.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks import harness, rivals
from pallas_kernels import get_cache_format, sparse_attention

DIM, ROPE, WINDOW = 512, 64, 128
BATCHES = [1, 8, 32, 64, 128, 256]
CSA = [(64, 512, 1), (128, 1024, 1), (64, 512, 2), (128, 1024, 2)]
HCA = [(64, 32, 1), (64, 1024, 1), (64, 8192, 1), (64, 1024, 2)]
"""Heads, entries, query tokens of a request."""
CODEC = get_cache_format("fp8_ue8m0").entry
NUM_INPUTS = 4
FLOPS = 820e12
RIVAL = "FlashMLA sparse_decode_fwd"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON to keep the rows in")
    parser.add_argument("--rival", help="FlashMLA's library; without it only ours is timed")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--only", choices=["csa", "hca"])
    args = parser.parse_args()
    bandwidth = harness.copy_bandwidth()
    rival = load_rival(args.rival) if args.rival else None
    rows = []
    for family, cases in (("csa", CSA), ("hca", HCA)):
        for num_heads, num_entries, num_queries in cases if args.only in (None, family) else ():
            for batch in args.batches:
                shape = (batch, num_queries, num_heads, num_entries)
                limit = max(
                    batch * num_queries * bytes_of(num_heads, num_entries) / bandwidth,
                    4 * batch * num_queries * num_heads * (WINDOW + num_entries) * DIM / FLOPS,
                )
                rows.append(
                    harness.row(
                        f"sparse_attention {family}",
                        f"{batch} x {num_queries} tokens, {num_heads} heads, "
                        f"{WINDOW} + {num_entries} keys",
                        harness.median_us(attend, inputs(family, *shape)),
                        rival=RIVAL if rival else None,
                        rival_us=rival(*shape) if rival else None,
                        limit_us=limit * 1e6,
                    )
                )
    harness.report(rows, args.results)


def bytes_of(num_heads, num_entries):
    """Of a query token: its keys, its queries and its output."""
    return 584 * (WINDOW + num_entries) + 2 * 2 * num_heads * DIM


@jax.jit
def attend(arguments):
    return sparse_attention(**arguments, codec=CODEC, scale=DIM**-0.5)


def inputs(family, batch, num_queries, num_heads, num_entries):
    """Four calls: different queries and entries of the same cache."""
    entries_per_block = 32 if family == "csa" else 1
    context = max(16384 // 4 if family == "csa" else 0, num_entries)
    logical = context // entries_per_block
    num_tokens = batch * num_queries
    key = jax.random.key(num_entries)
    ring, rows = planes(key, 1, batch, WINDOW), planes(key, num_tokens)
    pool = planes(key, 1, batch * logical, entries_per_block)
    table = jax.random.permutation(key, batch * logical).astype(jnp.int32).reshape(batch, logical)
    requests = jnp.arange(batch, dtype=jnp.int32).repeat(num_queries)
    lengths = jnp.full(num_tokens, 4 * WINDOW, jnp.int32)
    places = {
        "request_ids": requests,
        "slots": requests,
        "lengths": lengths,
        "positions": lengths + jnp.tile(jnp.arange(num_queries, dtype=jnp.int32), batch),
        "layer": jnp.int32(0),
    }
    cache = {"ring": ring, "rows": rows, "pool": pool, "block_table": table}

    def call(seed):
        keys = jax.random.split(jax.random.fold_in(key, seed), 3)
        queries = jax.random.normal(keys[0], (num_tokens, num_heads, DIM), jnp.bfloat16)
        sink = jax.random.normal(keys[1], (num_heads,))
        selected = choose(keys[2], num_tokens, num_entries, context)
        return ({"queries": queries, "sink": sink, "selected": selected} | cache | places,)

    return [call(seed) for seed in range(NUM_INPUTS)]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def choose(key, num_tokens, num_selected, num_entries):
    """i32[T, K] of 0 .. E - 1, ascending, none twice."""
    shuffled = jax.random.uniform(key, (num_tokens, num_entries))
    return jnp.sort(jnp.argsort(shuffled, axis=1)[:, :num_selected], axis=1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def planes(key, *lead):
    """Values of about unit size: normal codes, scales of 1/4 to 2."""
    keys = jax.random.split(key, 3)
    codes = jax.random.normal(keys[0], (*lead, DIM - ROPE), jnp.bfloat16)
    return {
        "nope": jax.lax.bitcast_convert_type(codes.astype(jnp.float8_e4m3fn), jnp.uint8),
        "rope": jax.random.normal(keys[1], (*lead, ROPE), jnp.bfloat16),
        "scale": jax.random.randint(keys[2], (*lead, 8), 125, 129, jnp.uint8),
    }


def load_rival(library):
    """A function (requests, query tokens, heads, entries) -> median us of a call."""
    import torch

    torch.ops.load_library(library)
    device = {"device": "cuda"}

    def pages(num_pages, page_rows):
        raw = torch.empty(num_pages, -(-page_rows * 584 // 576) * 576, dtype=torch.uint8, **device)
        data = raw[:, : page_rows * 576].view(num_pages, page_rows, 576)
        codes = torch.randn(num_pages, page_rows, 448, **device).to(torch.float8_e4m3fn)
        data[:, :, :448] = codes.view(torch.uint8)
        rope = torch.randn(num_pages, page_rows, 64, dtype=torch.bfloat16, **device)
        data[:, :, 448:] = rope.view(torch.uint8)
        raw[:, page_rows * 576 : page_rows * 584] = 127
        rows = raw[:, : page_rows * 584].view(torch.float8_e4m3fn)
        return rows.view(num_pages, page_rows, 1, 584)

    def time_us(batch, num_queries, num_heads, num_entries):
        context = max(4096, num_entries)
        window, extra = pages(batch, 256), pages(batch * context // 64, 64)
        lead = (batch, num_queries)
        first = torch.arange(batch, device="cuda", dtype=torch.int32)[:, None, None]

        def call():
            queries = torch.randn(*lead, num_heads, DIM, dtype=torch.bfloat16, **device)
            chosen = [
                torch.rand(*lead, size, **device).argsort(-1)[..., :count].int() + first * size
                for size, count in ((256, WINDOW), (context, num_entries))
            ]
            sink, plan = torch.randn(num_heads, **device), [None, None]

            def run():
                *_, plan[0], plan[1] = torch.ops._flashmla_C.sparse_decode_fwd(
                    queries, window, chosen[0], None, sink, *plan, extra, chosen[1], None,
                    DIM, DIM**-0.5, None, False,
                )  # fmt: skip

            return run

        return rivals.median_us([call() for _ in range(NUM_INPUTS)])

    return time_us


if __name__ == "__main__":
    main()
