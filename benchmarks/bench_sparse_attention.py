"""Sparse attention beside FlashMLA: `python -m benchmarks.bench_sparse_attention [results]`.

Each request has a full window and either 512 or 1024 random CSA entries or all HCA entries, some
also in a cache with room for more, in the released format. With `--baseline SO`, vLLM's
`_flashmla_C.abi3.so`, FlashMLA's decode of as many keys (window and extra cache) is timed on the
same GPU through torch.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import baselines, draws
from benchmarks.cases.sparse_attention import (
    BASELINE_RING,
    BASELINE_ROOM,
    BATCHES,
    CSA,
    DIM,
    HCA,
    ROOM,
    ROPE,
    WINDOW,
)
from dsv4_jax.bench import compare, timing
from dsv4_jax.bench.roofline import BF16_FLOPS
from helpers.calls import make_call
from pallas_kernels import LayerPlanes, get_cache_format, sparse_attention
from pallas_kernels.sparse_attention import op
from pallas_kernels.sparse_attention.reference import Arguments

CODEC = get_cache_format("fp8_ue8m0").entry
NUM_INPUTS = 4
BASELINE = "FlashMLA sparse_decode_fwd"


def main():
    parser = baselines.make_parser(__doc__, "FlashMLA's library")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--only", choices=["csa", "hca"])
    args = parser.parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [
        case(family, (batch, num_queries, num_heads, num_entries, *room), bandwidth, args.baseline)
        for family, cases in (("csa", CSA), ("hca", HCA + ROOM))
        for num_heads, num_entries, num_queries, *room in cases
        for batch in args.batches
        if args.only in (None, family)
    ]
    return compare.measure(cases, args.results)


def case(family, shape, bandwidth, library):
    """One row; `shape` is (requests, query tokens of each, heads, entries, room for entries)."""
    batch, num_queries, num_heads, num_entries, *room = shape
    keys = " of ".join(map(str, [num_entries, *room]))
    limit = max(
        batch * num_queries * bytes_of(num_heads, num_entries) / bandwidth,
        4 * batch * num_queries * num_heads * (WINDOW + num_entries) * DIM / BF16_FLOPS,
    )
    return compare.Case(
        f"sparse_attention {family}",
        f"{batch} x {num_queries} tokens, {num_heads} heads, {WINDOW} + {keys} keys",
        attend,
        lambda: (None, inputs(family, *shape)),
        roofline_us=limit * 1e6,
        baseline=BASELINE if library else None,
        baseline_us=(lambda: load_baseline(library)(*shape)) if library else None,
    )


def bytes_of(num_heads, num_entries):
    """Bytes of a query token: its keys, its queries and its output."""
    return 584 * (WINDOW + num_entries) + 2 * 2 * num_heads * DIM


@jax.jit
def attend(arguments):
    return sparse_attention(**arguments, scale=DIM**-0.5)


def attend_by_tiling(tiling, arguments):
    """The kernel alone, its keys cut as it is told."""
    kernel = op.choose_kernel().sparse_attention
    return kernel(Arguments(**arguments, scale=DIM**-0.5), tiling=tiling)


def inputs(family, batch, num_queries, num_heads, num_entries, room=0):
    """Four calls: different queries and entries of the same cache."""
    entries_per_block = 32 if family == "csa" else 1
    context = max(16384 // 4 if family == "csa" else 0, num_entries, room)
    logical = context // entries_per_block
    num_tokens = batch * num_queries
    rng = np.random.default_rng(num_entries)
    made = draws.make(
        {
            "ring": planes(1, batch, WINDOW),
            "rows": planes(num_tokens),
            "pool": planes(1, batch * logical, entries_per_block),
            "queries": [draws.Draw((num_tokens, num_heads, DIM), jnp.bfloat16)] * NUM_INPUTS,
            "sink": [draws.Draw((num_heads,))] * NUM_INPUTS,
        }
    )
    requests = np.arange(batch, dtype=np.int32).repeat(num_queries)
    lengths = np.full(num_tokens, 4 * WINDOW, np.int32)
    call_indices = make_call(
        draws.blocks(rng, batch, logical),
        requests,
        slots=requests,
        lengths=lengths,
        positions=lengths + np.tile(np.arange(num_queries, dtype=np.int32), batch),
        visible=np.full(num_tokens, num_entries if family == "hca" else context),
    )
    layer = jnp.int32(0)
    shared = {name: LayerPlanes(made[name], layer, CODEC) for name in ("ring", "pool")}
    shared |= {"rows": made["rows"], "call": call_indices}

    def call(number):
        chosen = choose(rng, num_tokens, num_entries, num_entries if room else context)
        padding = [(0, 0), (0, max(room - num_entries, 0))]
        selected = jnp.asarray(np.pad(chosen, padding, constant_values=-1))
        queries, sink = made["queries"][number], made["sink"][number]
        return ({"queries": queries, "sink": sink, "selected": selected} | shared,)

    return [call(number) for number in range(NUM_INPUTS)]


def choose(rng, num_tokens, num_selected, num_entries):
    """i32[T, K], distinct numbers of 0 .. E - 1 in ascending order."""
    return np.sort(draws.different(rng, num_tokens, num_selected, num_entries), axis=1)


def planes(*lead):
    """Draws of values of about unit size: normal codes, scales from 1/4 to 2."""
    return {
        "nope": draws.Draw((*lead, DIM - ROPE), jnp.float8_e4m3fn, as_bytes=True),
        "rope": draws.Draw((*lead, ROPE), jnp.bfloat16),
        "scale": draws.Draw((*lead, 8), jnp.uint8, among=range(125, 129)),
    }


@functools.cache
def load_baseline(library):
    """Returns a function (requests, query tokens, heads, entries, room) -> median microseconds."""
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

    def time_us(batch, num_queries, num_heads, num_entries, room=0):
        context = max(BASELINE_ROOM, num_entries, room)
        window, extra = pages(batch, BASELINE_RING), pages(batch * context // 64, 64)
        lead = (batch, num_queries)
        first = torch.arange(batch, device="cuda", dtype=torch.int32)[:, None, None]

        def call():
            queries = torch.randn(*lead, num_heads, DIM, dtype=torch.bfloat16, **device)
            chosen = [
                torch.rand(*lead, size, **device).argsort(-1)[..., :count].int() + first * size
                for size, count in ((BASELINE_RING, WINDOW), (context, room or num_entries))
            ]
            length = torch.full((batch,), num_entries, dtype=torch.int32, **device)
            length = length if room else None
            sink, plan = torch.randn(num_heads, **device), [None, None]

            def run():
                *_, plan[0], plan[1] = torch.ops._flashmla_C.sparse_decode_fwd(
                    queries, window, chosen[0], None, sink, *plan, extra, chosen[1], length,
                    DIM, DIM**-0.5, None, False,
                )  # fmt: skip

            return run

        return baselines.median_us([call() for _ in range(NUM_INPUTS)])

    return time_us


if __name__ == "__main__":
    sys.exit(main())
