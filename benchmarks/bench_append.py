"""Appends beside vLLM's launches for the same work: `python -m benchmarks.bench_append [results]`.

In a decode step the append of a CSA or HCA layer is one launch: norm, RoPE, encoding, the window
row, the compressor states, and the windows that close, in all requests or in one of M. With
`--baseline FOLDER`, vLLM's launches for it are summed: the window insert, then save and compress of
each compressor. Only the insert of its C++ library (`--library SO`) also norms and rotates queries;
without the library our op gets a single head. vLLM's launches leave index queries out, so the rows
with a baseline do too; other rows include them, as a step does. Also times `encode_tokens`,
`round_index_queries` and `append_tokens` of a prefill.
"""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks import baselines, draws, layer_calls, vllm_compressor
from benchmarks.cases.cache import (
    BATCHES,
    BATCHES_WITH_INDEX,
    COMPRESSION_RATIO,
    EPS,
    HEADS,
    IC,
    INDEX_HEADS,
    LAYERS,
    PROMPT,
    TOKENS,
    WINDOW,
    C,
    state_shape,
)
from benchmarks.layer_calls import FORMAT
from dsv4_jax.bench import compare, timing

BASELINE = "vLLM insert + save + compress"


def main():
    library = "vLLM's C++ ops, whose insert includes queries"
    parser = baselines.make_parser(__doc__, "folder of vLLM's Triton ops", library=library)
    args = parser.parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [
        decode_case(kind, batch, closing, bandwidth, args.baseline, args.library)
        for kind in ("csa", "hca")
        for batch in BATCHES
        for closing in (("all", "some") if batch > 1 else ("all",))
    ]
    cases += [
        decode_case("csa", batch, "all", bandwidth, index_heads=INDEX_HEADS)
        for batch in BATCHES_WITH_INDEX
    ]
    cases += [encode_case(tokens, bandwidth) for tokens in TOKENS]
    cases += [round_case(tokens, bandwidth) for tokens in TOKENS]
    cases += [append_case(kind, PROMPT, bandwidth) for kind in ("csa", "hca")]
    return compare.measure(cases, args.results)


def decode_case(kind, batch, closing, bandwidth, folder=None, library=None, index_heads=0):
    """A decode step's `append_and_flush` of one layer kind."""
    num_heads = 1 if folder and not library else HEADS
    shape = (kind, batch, closing, num_heads, index_heads)
    index = f", {index_heads} index heads" if index_heads else ""
    return compare.Case(
        f"append_and_flush {kind}",
        f"{batch} requests, {closing} closing, {num_heads} heads{index}",
        functools.partial(layer_calls.append_and_flush, kind=kind),
        lambda: layer_calls.append_and_flush_case(*shape, layers=LAYERS["decode"]),
        roofline_us=layer_calls.append_and_flush_bytes(*shape) / bandwidth * 1e6,
        baseline=BASELINE if folder else None,
        baseline_us=(lambda: vllm_compressor.load(folder, library).decode_us(*shape[:4]))
        if folder
        else None,
    )


def encode_case(num_tokens, bandwidth, num_heads=HEADS):
    """`encode_tokens` of a call."""

    def make():
        layers = LAYERS["prefill"]
        queries, kv = draws.make(
            [
                [draws.Draw((num_tokens, num_heads, C), jnp.bfloat16)] * layers,
                [draws.Draw((num_tokens, C), jnp.bfloat16)] * layers,
            ]
        )
        positions = jnp.asarray(np.arange(num_tokens), jnp.int32)
        return None, [(*each, positions) for each in zip(queries, kv, strict=True)]

    norm = jnp.asarray(np.ones(C), jnp.bfloat16)
    norm_rope = pk.NormRope(norm, layer_calls.frequencies(), EPS)

    def encode(queries, kv, positions):
        return pk.encode_tokens(queries, kv, norm_rope, positions, codec=FORMAT.entry)

    num_bytes = num_tokens * (4 * num_heads * C + 2 * C + layer_calls.FAMILIES["main"][2])
    return compare.Case(
        "encode_tokens",
        f"{num_tokens} tokens, {num_heads} heads",
        encode,
        make,
        roofline_us=num_bytes / bandwidth * 1e6,
    )


def round_case(num_tokens, bandwidth):
    """`round_index_queries` of a call."""
    heads, layers = INDEX_HEADS, LAYERS["prefill"]
    frequencies, codec = layer_calls.frequencies(), FORMAT.index_key

    def make():
        drawn = draws.make(layer_calls.index_queries(num_tokens, heads, layers))
        positions = jnp.asarray(np.arange(num_tokens), jnp.int32)
        return None, [(queries, positions) for queries in drawn]

    def round_queries(queries, positions):
        return pk.round_index_queries(queries, frequencies, positions, codec=codec)

    return compare.Case(
        "round_index_queries",
        f"{num_tokens} tokens, {heads} index heads",
        round_queries,
        make,
        roofline_us=num_tokens * 6 * heads * IC / bandwidth * 1e6,
    )


def append_case(kind, num_tokens, bandwidth):
    """`append_tokens` of a prompt: its rows in ring and states; HCA's last window stays open."""
    num_tokens, layers = num_tokens - (2 if kind == "hca" else 0), LAYERS["prefill"]
    dims = [dim for dim, _, _ in layer_calls.FAMILIES.values()] if kind == "csa" else []
    num_bytes = 2 * WINDOW * layer_calls.FAMILIES["main"][2]
    num_bytes += (
        sum(2 * 8 * math.prod(state_shape(kind, dim=dim)) for dim in dims)
        if dims
        else num_tokens % COMPRESSION_RATIO["hca"] * 8 * C
    )

    def make():
        rings = [layer_calls.planes(FORMAT.entry, C, layers, 1, WINDOW)]
        for dim in dims:
            rings += layer_calls.states_of(kind, layers, 1, dim=dim)
        new = [layer_calls.projections((num_tokens,), 2 * dim, layers) for dim in dims]
        folded = layer_calls.projections((num_tokens,), C, layers)
        running = jax.ShapeDtypeStruct(state_shape("hca", layers, 1, dim=C), jnp.float32)
        window = layer_calls.planes(FORMAT.entry, C, num_tokens)
        state, window, new, folded = draws.make(
            [(rings, None if dims else running), window, new, None if dims else folded]
        )
        inputs = [
            ([window, *(n[i] for n in new)], folded and folded[i], jnp.int32(i))
            for i in range(layers)
        ]
        return state, inputs

    call = layer_calls.prefill_call(num_tokens, jnp.asarray(np.full((1, 1), -1), jnp.int32))

    def append(state, rows, projected, layer):
        rings, running = state
        rings, running = pk.append_tokens(
            rings,
            rows,
            running,
            projected,
            call,
            layer=layer,
            compression_ratio=COMPRESSION_RATIO["hca"],
        )
        return (list(rings), running), ()

    return compare.Case(
        f"append_tokens {kind}",
        f"{num_tokens} tokens of one request",
        append,
        make,
        roofline_us=num_bytes / bandwidth * 1e6,
    )


if __name__ == "__main__":
    sys.exit(main())
