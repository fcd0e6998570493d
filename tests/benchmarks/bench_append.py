"""Appends beside vLLM's launches for the same work: `python -m benchmarks.bench_append [results]`.

A decode step of a CSA or an HCA layer, the whole of it one launch here: norm, rotation and
encoding, window row, compressor states, and the windows that close, in all requests or in one of M.
With `--rival FOLDER`, vLLM's launches are summed: window insert, then save and compress of each
compressor. Its insert norms and rotates queries only in its C++ operator: `--library SO` brings
that, and without it ours has a single head. Also `encode_tokens` and `append_tokens` of a prefill.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from benchmarks import harness, layer_calls, rival_compressor
from benchmarks.layer_calls import EPS, FORMAT, WINDOW, C

BATCHES = [1, 8, 64, 256]
LAYERS = {"decode": 20, "prefill": 4}
RIVAL = "vLLM insert + save + compress"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON to keep the rows in")
    parser.add_argument(
        "--rival", help="folder of vLLM's Triton ops; without it only ours is timed"
    )
    parser.add_argument("--library", help="vLLM's C++ ops, for queries in the rival's insert too")
    args = parser.parse_args()
    bandwidth = harness.copy_bandwidth()
    rival = rival_compressor.load(args.rival, args.library) if args.rival else None
    num_heads = 1 if rival and not args.library else 64
    rows = []
    for kind in ("csa", "hca"):
        for batch in BATCHES:
            for closing in ("all", "some") if batch > 1 else ("all",):
                state, inputs, num_bytes = layer_calls.append_and_flush_case(
                    kind, batch, closing, num_heads, layers=LAYERS["decode"]
                )
                append = functools.partial(layer_calls.append_and_flush, kind=kind)
                rows.append(
                    harness.row(
                        f"append_and_flush {kind}",
                        f"{batch} requests, {closing} closing, {num_heads} heads",
                        harness.median_us(append, inputs, state=state),
                        rival=RIVAL if rival else None,
                        rival_us=rival and rival.decode_us(kind, batch, closing, num_heads),
                        limit_us=num_bytes / bandwidth * 1e6,
                    )
                )
    rows += [encode_row(tokens, bandwidth) for tokens in (64, 8192)]
    rows += [append_row(kind, 8192, bandwidth) for kind in ("csa", "hca")]
    harness.report(rows, args.results)


def encode_row(num_tokens, bandwidth, num_heads=64):
    """`encode_tokens`."""
    inputs = []
    for seed in range(LAYERS["prefill"]):
        shape = (num_tokens, num_heads, C)
        queries = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        inputs.append((queries, queries[:, 0], jnp.arange(num_tokens, dtype=jnp.int32)))
    norm, frequencies = jnp.ones(C, jnp.bfloat16), layer_calls.frequencies()

    def encode(queries, kv, positions):
        return pk.encode_tokens(
            queries, kv, norm, frequencies, positions, codec=FORMAT.entry, eps=EPS
        )

    num_bytes = num_tokens * (4 * num_heads * C + 2 * C + layer_calls.FAMILIES["main"][2])
    return harness.row(
        "encode_tokens",
        f"{num_tokens} tokens, {num_heads} heads",
        harness.median_us(encode, inputs),
        limit_us=num_bytes / bandwidth * 1e6,
    )


def append_row(kind, num_tokens, bandwidth):
    """`append_tokens`: what a prompt leaves in ring and states; HCA's last window stays open."""
    num_tokens, layers = num_tokens - (2 if kind == "hca" else 0), LAYERS["prefill"]
    rings = [layer_calls.planes(FORMAT.entry, C, layers, 1, WINDOW)]
    new, running, key = [], None, jax.random.key(0)
    num_bytes = 2 * WINDOW * layer_calls.FAMILIES["main"][2]
    if kind == "csa":
        for dim, _, _ in layer_calls.FAMILIES.values():
            rings += layer_calls.projections(key, (layers, 1, 8), 2 * dim)
            new.append(layer_calls.projections(key, (num_tokens,), 2 * dim, layers))
            num_bytes += 2 * 8 * 16 * dim
    else:
        running = jnp.zeros((layers, 1, 3, C))
        folded = layer_calls.projections(key, (num_tokens,), C, layers)
        num_bytes += num_tokens % 128 * 8 * C
    window = layer_calls.planes(FORMAT.entry, C, num_tokens)
    one, none = jnp.full(1, num_tokens, jnp.int32), jnp.zeros(1, jnp.int32)
    inputs = [
        ([window, *(n[i] for n in new)], folded[i] if running is not None else None, jnp.int32(i))
        for i in range(layers)
    ]

    def append(state, rows, projected, layer):
        static = {"layer": layer, "rate": 128, "max_count": num_tokens}
        rings, running = state
        rings, running = pk.append_tokens(
            rings, rows, running, projected, none, none, one, none, **static
        )
        return (list(rings), running), ()

    return harness.row(
        f"append_tokens {kind}",
        f"{num_tokens} tokens of one request",
        harness.median_us(append, inputs, state=(rings, running)),
        limit_us=num_bytes / bandwidth * 1e6,
    )


if __name__ == "__main__":
    main()
