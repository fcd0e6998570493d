"""Ops that have one form for few tokens and one for many, each form at the same numbers of tokens.

    python -m benchmarks.bench_many_tokens [results.json] [--tokens 16,64,512] [--experts 192]

One layer of V4-Flash; a line for each op and number of tokens, with microseconds of each form.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from benchmarks.cases.hyper_connections import MOST_OF_FEW, TOKENS
from dsv4_jax.bench.loops import median_us
from dsv4_jax.config import DSV4Config
from pallas_kernels.expert_mlp import triton_counting, triton_worklist
from pallas_kernels.expert_mlp.worklist import sort_pairs
from pallas_kernels.hyper_connections import triton_gpu as hyper_connections
from pallas_kernels.hyper_connections.reference import Arguments as ReadArguments
from pallas_kernels.write_streams import reference, triton_gpu, triton_many
from pallas_kernels.write_streams.reference import Arguments as WriteArguments

CONFIG = DSV4Config.flash()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=pathlib.Path)
    parser.add_argument("--tokens", default=TOKENS, type=lambda t: [int(n) for n in t.split(",")])
    parser.add_argument("--experts", type=int, default=CONFIG.num_routed_experts)
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        for op, forms, given in (
            streams_written(tokens), streams_read(tokens), pairs_sorted(tokens, args.experts),
        ):  # fmt: skip
            times = {name: median_us(form, [given], rounds=20) for name, form in forms.items()}
            rows.append({"op": op, "tokens": tokens, "us": times})
            each = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
            print(f"{op}, {tokens:,} tokens: {each}", flush=True)
            if args.results:
                args.results.write_text(json.dumps(rows, indent=1))


def streams_written(tokens):
    """The streams after a sublayer, and their products."""
    num, dim = CONFIG.hc_mult, CONFIG.hidden_size
    keys = jax.random.split(jax.random.key(tokens), 5)
    given = (
        jax.random.normal(keys[0], (tokens, num, dim), jnp.bfloat16),
        jax.random.normal(keys[1], (tokens, dim), jnp.bfloat16),
        jax.random.uniform(keys[2], (tokens, num)),
        jax.nn.softmax(jax.random.normal(keys[3], (tokens, num, num))),
        jax.random.normal(keys[4], ((2 + num) * num, num * dim)) * (num * dim) ** -0.5,
    )

    def form(write):
        return lambda *arrays: write(WriteArguments(*arrays))

    forms = {"XLA": form(reference.write_streams), "many": form(triton_many.write_streams)}
    if tokens <= MOST_OF_FEW:
        forms["few"] = form(triton_gpu.write_streams)
    return "write_streams", forms, given


def streams_read(tokens):
    """What a sublayer reads, given the products as many tokens leave them."""
    num, dim = CONFIG.hc_mult, CONFIG.hidden_size
    keys = jax.random.split(jax.random.key(tokens), 4)
    given = (
        jax.random.normal(keys[0], (tokens, 48, (2 + num) * num)),
        jnp.ones(3),
        jax.random.normal(keys[1], ((2 + num) * num,)),
        jax.random.normal(keys[2], (tokens, num, dim), jnp.bfloat16),
        jax.random.normal(keys[3], (dim,), jnp.bfloat16),
    )
    sizes = CONFIG.hc_sinkhorn_iters, CONFIG.hc_eps, CONFIG.rms_norm_eps

    def form(is_many):
        def read(*arrays):
            return hyper_connections.hyper_connections(
                ReadArguments(*arrays, *sizes), is_many=is_many
            )

        return read

    return "hyper_connections", {"few": form(False), "many": form(True)}, given


def pairs_sorted(tokens, num_experts):
    """Pairs sorted by expert, where each token picks at random."""
    picks, tile_rows, spare = CONFIG.num_experts_per_token, 64, 64
    draws = jax.random.uniform(jax.random.key(tokens), (tokens, num_experts))
    ids = jax.lax.top_k(draws, picks)[1].astype(jnp.int32)
    kernel = functools.partial(
        triton_worklist.sort_few_pairs, num_experts=num_experts, tile_rows=tile_rows, spare=spare
    )

    def xla(ids, weights):
        work = sort_pairs(ids, num_experts, tile_rows)
        share = jnp.zeros(work.token.shape[0] + spare, jnp.float32).at[work.row].set(weights)
        return work.token, work.row, work.expert, work.first, work.num_rows, share

    counting = functools.partial(
        triton_counting.sort_many_pairs, num_experts=num_experts, tile_rows=tile_rows, spare=spare
    )
    forms = {"XLA": xla, "by counting": counting}
    if ids.size <= triton_worklist.MAX_PAIRS:
        forms["kernel"] = kernel
    return "sort_by_expert", forms, (ids, jnp.full(ids.shape, 0.25, jnp.float32))


if __name__ == "__main__":
    main()
