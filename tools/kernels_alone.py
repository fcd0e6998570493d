"""A small call of every kernel and nothing beside it, for tools that watch a GPU's memory.

    compute-sanitizer --tool racecheck python -m tools.kernels_alone flush_csa scores_fp8
    python -m tools.kernels_alone            names the calls

Inputs are drawn on the CPU, and no reference runs on the GPU: in a process where one does,
compute-sanitizer itself may end with a segmentation fault.
"""

import argparse
import dataclasses
import functools
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from helpers import attention_cases, inputs, layer_cases
from helpers.calls import make_call
from pallas_kernels import get_cache_format
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.index_scores import tiling as scores_tiling
from pallas_kernels.select_top_k import mosaic_gpu as select_kernel
from pallas_kernels.select_top_k import ptx, radix_steps
from pallas_kernels.sparse_attention import call_shapes, op
from pallas_kernels.sparse_attention.reference import Arguments
from tools import product_calls

ATTENTION, TOKENS = attention_cases.SMALLEST_FOR_A_KERNEL, ((300, 9, 0), (1, 1, 2))
FREQUENCIES = np.float32(100.0 ** -np.linspace(0, 1, ATTENTION.rope_dim // 2))


def keep_tokens(kind, name, fused):
    """Appends and flushes: windows close in some rows, blocks are absent, rows lie idle."""
    rng = np.random.default_rng(0)
    histories = layer_cases.draw_histories(rng, kind, layer_cases.LENGTHS)
    norms = layer_cases.draw_norms(rng, kind, jnp.bfloat16)
    cuts = [[1] * 5] * 3 if fused else [cut[:2] for cut in layer_cases.CUTS]
    num_tokens = 5 if fused else 64
    return layer_cases.run(name, kind, histories, cuts, norms, num_tokens=num_tokens, fused=fused)


def score(name, tiling=None, requests=(0, 1, 2)):
    """Scores of three tokens, of those requests; the last sees nothing."""
    codec, rng = get_cache_format(name).index_key, np.random.default_rng(0)
    entries_per_block, visible = 16, np.int32([200, 65, 0])
    shapes = codec.plane_shapes(scores_tiling.DIM, 0)
    blocks = -(-visible // entries_per_block)
    with jax.default_device(jax.devices("cpu")[0]):
        table = inputs.shuffled_table(rng, blocks, num_logical=max(blocks), num_physical=60)
        keys = rng.normal(size=(60 * entries_per_block, scores_tiling.DIM))
        encoded = inputs.encode(codec, [keys], 0)[0][0]
    pool = {
        key: np.asarray(encoded[key]).reshape(1, 60, entries_per_block, *shape.shape)
        for key, shape in shapes.items()
    }
    run = functools.partial(scores_kernel.index_scores, tiling=tiling)
    with jax.default_device(jax.devices("cpu")[0]):
        call = make_call(table, np.int32(requests), visible=visible)
    return jax.jit(run)(
        np.float32(rng.integers(-6, 7, (3, scores_tiling.HEADS, scores_tiling.DIM))),
        np.float32(rng.normal(size=(3, scores_tiling.HEADS))),
        pk.LayerPlanes(pool, np.int32(0), codec),
        call,
    )


def select(num_scores, k):
    """Rows of random scores and of equal ones."""
    scores = np.random.default_rng(0).normal(size=(3, num_scores)).astype(np.float32)
    scores[2] = 1.0
    visible = np.int32([num_scores, num_scores // 3, num_scores])
    run = functools.partial(select_kernel.select_top_k, k=k)
    return jax.jit(run)(scores, visible)


def attend(name, splits, query_eps=None):
    """Windows that have gone round, selected entries, and inverse RoPE of the output.

    With `query_eps` of queries that the kernel norms and rotates.
    """
    codec = get_cache_format(name).entry
    with jax.default_device(jax.devices("cpu")[0]):
        case = attention_cases.draw_case(ATTENTION, codec, *TOKENS)
    kernel, tiling = op.choose_kernel().sparse_attention, call_shapes.Tiling(splits=splits)

    def run(**arguments):
        given = Arguments(**arguments, scale=ATTENTION.scale, query_eps=query_eps)
        return kernel(given, tiling=tiling)

    return jax.jit(run)(**case.arguments, sink=ATTENTION.sink(), frequencies=FREQUENCIES)


def attend_few(name):
    """As `attend`, by the kernel of few tokens."""
    codec = get_cache_format(name).entry
    with jax.default_device(jax.devices("cpu")[0]):
        case = attention_cases.draw_case(ATTENTION, codec, *TOKENS)
    run = functools.partial(pk.sparse_attention, scale=ATTENTION.scale, backend="triton_gpu")
    return jax.jit(run)(**case.arguments, sink=ATTENTION.sink(), frequencies=FREQUENCIES)


def gather(name, **changes):
    """Selected entries and the window; changes are of the call."""
    codec = get_cache_format(name).entry
    with jax.default_device(jax.devices("cpu")[0]):
        case = attention_cases.draw_case(ATTENTION, codec, *TOKENS)
    static = {"dim": ATTENTION.dim, "backend": "triton_gpu"}
    given = case.arguments
    call = dataclasses.replace(given["call"], **changes)
    window = jax.jit(functools.partial(pk.gather_window, **static))
    entries = jax.jit(functools.partial(pk.gather_entries, **static))
    return (
        window(given["ring"], given["rows"], call),
        entries(given["pool"], call, given["selected"]),
    )


def round_queries(name):
    """Of five tokens."""
    queries = np.random.default_rng(0).normal(size=(5, 9, layer_cases.IC))
    run = functools.partial(
        pk.round_index_queries, codec=get_cache_format(name).index_key, backend="triton_gpu"
    )
    positions = np.arange(5, dtype=np.int32)
    queries = queries.astype(jnp.bfloat16)
    return jax.jit(run)(queries, layer_cases.FREQUENCIES, positions)


def mix(count):
    """Four streams of each token."""
    rng = np.random.default_rng(0)
    run = functools.partial(
        pk.hyper_connections, iters=20, eps=1e-6, norm_eps=1e-6, backend="triton_gpu"
    )
    shapes = ((count, 3, 24), (3,), (24,), (count, 4, 96), (96,))
    return jax.jit(run)(*(np.float32(rng.normal(size=shape)) for shape in shapes))


def move_rows():
    """Two rows packed, summed and put elsewhere, of planes of one, two and four words a load."""
    rng = np.random.default_rng(0)
    shapes = (((3, 5, 4, 192), np.uint8), ((2, 5, 4), jnp.bfloat16), ((4, 5, 3), np.int32))
    planes = [
        rng.integers(0, 256, math.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
        .view(dtype)
        .reshape(shape)
        for shape, dtype in shapes
    ]

    def run(planes, rows, places):
        packed, sums = pk.pack_rows(planes, rows, backend="triton_gpu")
        written = pk.unpack_rows(planes, places, packed, backend="triton_gpu")
        return sums, pk.sum_rows(packed, backend="triton_gpu"), written

    return jax.jit(run)(planes, np.int32([3, -1, 0]), np.int32([1, 2, -1]))


def gather_outside():
    """Blocks of a table far beyond the pool."""
    table = jnp.full((len(TOKENS[0]), 256), 10**6, jnp.int32)
    return gather("fp8_ue8m0", block_table=table)


def select_without_barriers():
    """Sums of counts that other warps may still be storing."""
    with (
        mock.patch.object(ptx, "BARRIER", ""),
        mock.patch.object(radix_steps, "synchronize", return_value=None),
    ):
        return select(5000, 512)


def score_without_waiting():
    """Products of queries that other warpgroups may still be storing; they have all landed."""
    wait = scores_kernel.plgpu.barrier_wait
    waits = itertools.chain([wait], itertools.repeat(lambda barrier: None))
    leave_out = mock.patch.object(
        scores_kernel.plgpu, "barrier_wait", side_effect=lambda barrier: next(waits)(barrier)
    )
    with leave_out:
        return score("fp8_ue8m0")


CALLS = {
    **{
        f"{'append' if fused else 'flush'}_{kind}": functools.partial(
            keep_tokens, kind, "fp8_ue8m0", fused
        )
        for fused in (True, False)
        for kind in layer_cases.COMPRESSION_RATIOS
    },
    "append_csa_nvfp4": functools.partial(keep_tokens, "csa", "fp8_per_entry", True),
    "scores_mxfp4": functools.partial(score, "fp8_ue8m0"),
    "scores_fp8": functools.partial(score, "fp8_ue8m0_fp8_index"),
    "scores_turns": functools.partial(
        score, "fp8_ue8m0", scores_tiling.Tiling(tiles=4, warpgroups=1)
    ),
    "scores_of_two_tokens": functools.partial(
        score, "fp8_ue8m0", scores_tiling.Tiling(tiles=4, warpgroups=4, tokens=2), (0, 0, 1)
    ),
    "select": functools.partial(select, 5000, 512),
    "select_in_parts": functools.partial(select, 40000, 512),
    "attend": functools.partial(attend, "fp8_ue8m0", 1),
    "attend_raw_queries": functools.partial(attend, "fp8_ue8m0", 1, 1e-6),
    "attend_in_splits": functools.partial(attend, "fp8_ue8m0", 3),
    "attend_bf16": functools.partial(attend, "bf16", 3),
    "attend_few": functools.partial(attend_few, "fp8_ue8m0"),
    "gather": functools.partial(gather, "fp8_ue8m0"),
    "round_queries": functools.partial(round_queries, "fp8_ue8m0"),
    "move_rows": move_rows,
    "mix": functools.partial(mix, 2),
    "mix_many": functools.partial(mix, product_calls.MANY_TOKENS),
    **product_calls.CALLS,
}


PLANTED = {
    "outside": gather_outside,
    "without_barriers": select_without_barriers,
    "without_waiting": score_without_waiting,
}
"""Faults that `memcheck`, `racecheck` and the interpreter have to find, one each."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    calls = CALLS | PLANTED
    if unknown := set(names) - set(calls):
        parser.error(f"no such call: {', '.join(sorted(unknown))}; there are {', '.join(calls)}")
    for name in names or calls:
        if names:
            jax.block_until_ready(calls[name]())
        print(name, flush=True)


if __name__ == "__main__":
    main()
