"""Tokens and warpgroups of a CTA of the index scores: `python -m benchmarks.tune_index_scores`.

The last tokens of one request's prompt, each of which sees what precedes it, as in a prefill call:
how such a call is cut, and how else it could be. Prints microseconds of a call.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import draws
from benchmarks.bench_index_scores import DIM, EB, FORMATS, HEADS, codec_of, key_planes, score
from dsv4_jax.bench.timing import time_calls
from helpers.calls import make_call
from pallas_kernels import LayerPlanes
from pallas_kernels.index_scores.tiling import Tiling, choose_tiling

CALLS = ((8192, 8192), (8192, 65536))
"""Tokens of the call, and entries that the last one sees."""
COMPRESSION_RATIO = 4
"""Tokens of an entry."""
TILE_M = 64
"""Keys of a tile, on Hopper."""
CUTS = ((1, 5), (1, 6), (2, 4), (3, 4), (4, 4), (4, 5), (5, 4), (6, 3), (6, 4), (8, 3))
"""Tokens and warpgroups of a CTA."""


def arguments_of(keys, num_tokens, num_entries):
    num_blocks = num_entries // EB
    made = draws.make(
        {
            "planes": key_planes(keys, num_blocks),
            "queries": draws.Draw((num_tokens, HEADS, DIM), jnp.bfloat16),
            "weights": draws.Draw((num_tokens, HEADS)),
        }
    )
    table = draws.blocks(np.random.default_rng(0), 1, num_blocks)
    positions = num_entries * COMPRESSION_RATIO - num_tokens + np.arange(num_tokens)
    return {
        "queries": made["queries"],
        "weights": made["weights"],
        "pool": LayerPlanes(made["planes"], jnp.int32(0), codec_of(keys)),
        "call": make_call(
            table, np.zeros(num_tokens), visible=(positions + 1) // COMPRESSION_RATIO
        ),
    }


def microseconds(arguments, tiling):
    run = jax.jit(functools.partial(score, tiling=tiling))

    def call(state):
        del state  # the last call's scores, whose memory the next one takes
        return run(arguments)

    return 1e6 * time_calls(call, run(arguments), max_calls=32, least_s=0.05)[0].median_s


def main():
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for keys, (num_tokens, num_entries) in itertools.product(FORMATS, CALLS):
        arguments, num_tiles = arguments_of(keys, num_tokens, num_entries), num_entries // TILE_M
        now = choose_tiling(num_tokens, num_tiles, keys == "MXFP4", num_requests=1)
        print(f"{keys}, {num_tokens:,} tokens, {num_entries:,} entries, cut as {now}")
        for tokens, groups in CUTS:
            tiling = Tiling(max(groups, num_tiles), groups, tokens=tokens)
            try:
                found = f"{microseconds(arguments, tiling):,.0f} us"
            except ValueError as error:  # more shared memory than there is
                found = str(error).splitlines()[0]
            print(f"  {tokens} tokens, {groups} warpgroups: {found}", flush=True)


if __name__ == "__main__":
    main()
