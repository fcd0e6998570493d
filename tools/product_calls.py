"""Small calls of the kernels that multiply weights, for `tools.kernels_alone`.

Weights are quantised on the CPU, and no reference runs on the GPU. Shapes are those of no model:
small, since a sanitizer is slow, and no multiple of a tile. Those of the models, which are timed
and compiled, are in `benchmarks/cases`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels.common import weights
from pallas_kernels.common.pending import PickedSums
from pallas_kernels.expert_mlp import triton_unpack
from pallas_kernels.product import Tiling, multiply_rows, swiglu_rows, triton_rows

DIM, OUT, EXPERTS, PICKED = 512, 320, 4, 2
MANY_TOKENS, MANY_ROWS = 515, 1027
"""So many that kernels have other forms for them, and no tile's multiple."""
NARROW = 100
"""Rows that are cut into narrow tiles, since wide ones would be fewer than SMs."""
QUANTIZE = {
    "fp8": weights.quantize_block_fp8,
    "small blocks": functools.partial(weights.quantize_block_fp8, block=weights.SMALL_BLOCK),
    "mxfp4": weights.quantize_mxfp4,
}
TILINGS = {
    "tiles": Tiling(16, 256, 2, persistent=1, band=2),
    "splits": Tiling(16, 128, 2, split_k=2),
    "few rows": Tiling(24, 256, 2, persistent=1, band=4, packed_stores=True),
    "rows on the left": Tiling(128, 128, 4, persistent=1, band=2, swap_ab=False),
}


def on_cpu():
    return jax.default_device(jax.devices("cpu")[0])


def weight(kind, *shape, seed=0, activations="fp8"):
    """A quantised weight, in NumPy."""
    with on_cpu():
        values = np.random.default_rng(seed).normal(size=shape) * shape[-1] ** -0.5
        values = jnp.asarray(values, jnp.float32)
        made = QUANTIZE[kind](values, dtype="bfloat16", activations=activations)
        return jax.tree.map(np.asarray, made)


def rows(count, dim=DIM):
    return np.random.default_rng(1).normal(size=(count, dim)).astype(jnp.bfloat16)


def multiply(kind, count, *, shape=(OUT, DIM), activations="fp8", tiling=None):
    """Rows with a weight, whose outputs are no multiple of a tile."""
    if tiling is None:
        run = functools.partial(pk.block_linear, backend="mosaic_gpu")
        return jax.jit(run)(rows(count, shape[1]), weight(kind, *shape, activations=activations))

    def run(x, one):
        return multiply_rows(x, [one], tiling=TILINGS[tiling])

    stack = jax.tree.map(lambda leaf: leaf[None], weight(kind, OUT, DIM))
    return jax.jit(run)(rows(count)[None], stack)


def gate_and_up(kind, count, *, tiling=None):
    """SwiGLU of two products."""
    run = functools.partial(pk.swiglu_linear, limit=2.0, backend="mosaic_gpu")
    if tiling is not None:
        run = functools.partial(swiglu_rows, limit=2.0, tiling=TILINGS[tiling])
    both = (weight(kind, OUT, DIM, seed=seed) for seed in (0, 1))
    return jax.jit(run)(rows(count), *both)


def experts(count, *, dim=256, shared=False):
    """Rows through the experts that they picked; some picked fewer, and one picked none."""
    rng, width = np.random.default_rng(2), 128
    ids = np.stack([rng.permutation(EXPERTS)[:PICKED] for _ in range(count)]).astype(np.int32)
    ids[1::3, 1] = -1
    ids[3:4] = EXPERTS
    shares = np.float32(rng.uniform(0.2, 1, ids.shape))
    shapes = ((width, dim), (width, dim), (dim, width))
    stacks = [weight("mxfp4", EXPERTS, *shape, seed=n) for n, shape in enumerate(shapes)]
    given = rows(count, dim), ids, shares, *stacks
    options = {"limit": 2.0, "backend": "mosaic_gpu"}
    if not shared:
        return jax.jit(functools.partial(pk.expert_mlp, **options))(*given)
    one = tuple(weight("fp8", *shape, seed=n) for n, shape in enumerate(shapes))
    return jax.jit(functools.partial(pk.mixture_mlp, **options))(*given, one)


def unpack():
    """Experts of 256 x 384 into block FP8."""
    return jax.jit(triton_unpack.unpack_to_fp8)(weight("mxfp4", 2, 256, 384))


def pick_rounded():
    """Rows rounded once, of which some are picked twice and some not."""
    x, one = rows(MANY_TOKENS), weight("fp8", 128, DIM)
    token = np.random.default_rng(6).integers(0, MANY_TOKENS, MANY_ROWS).astype(np.int32)

    def run(x, one, token):
        rounded = triton_rows.make_rows(x, one, num_spare=32)
        return triton_rows.pick_rows(rounded, token, num_spare=32)

    return jax.jit(run)(x, one, token)


def join(count):
    """Projections of one hidden state, with biases by position."""
    rng = np.random.default_rng(3)
    matrices = [(rng.normal(size=(n, 600)) / 30).astype(jnp.bfloat16) for n in (20, 8, 9)]
    biases = [np.float32(rng.normal(size=(3, 20))), np.float32(rng.normal(size=(5, 8))), None]
    run = functools.partial(pk.joined_linears, backend="triton_gpu")
    return jax.jit(run)(rows(count, 600), matrices, biases, np.arange(count, dtype=np.int32))


def write(count, dim=320, *, picked=False):
    """Outputs to four streams, or sums of the rows that tokens picked; one picked fewer."""
    rng, streams = np.random.default_rng(4), 4
    output = rows(count, dim)
    if picked:
        row = rng.integers(0, 3 * count, (count, PICKED)).astype(np.int32)
        ids = np.where(np.arange(row.size).reshape(row.shape) == 1, -1, row).astype(np.int32)
        total, lead = 3 * count, (count,)
        products = np.float32(rng.normal(size=(total + count, dim)))
        output = PickedSums(products, row, ids, total, total, jnp.dtype("bfloat16"), lead)
    given = (
        rng.normal(size=(count, streams, dim)).astype(jnp.bfloat16),
        output,
        np.float32(rng.uniform(0, 2, (count, streams))),
        np.float32(rng.dirichlet(np.ones(streams), (count, streams))),
        np.float32(rng.normal(size=(24, streams * dim)) / 40),
    )
    return jax.jit(functools.partial(pk.write_streams, backend="triton_gpu"))(*given)


def pick(count):
    """Three of 24 experts, for all tokens but the second, which is padding."""
    rng = np.random.default_rng(5)
    run = functools.partial(pk.pick_experts, count=3, scaling=2.5, backend="triton_gpu")
    logits, bias = np.float32(rng.normal(size=(count, 24))), np.float32(rng.normal(size=24))
    segments = np.where(np.arange(count) == 1, -1, 0).astype(np.int32)
    return jax.jit(run)(logits, bias=bias, segment_ids=segments)


CALLS = {
    "multiply_fp8": functools.partial(multiply, "fp8", 5),
    "multiply_fp8_narrow": functools.partial(multiply, "fp8", NARROW),
    "multiply_fp8_many": functools.partial(multiply, "fp8", 300, tiling="rows on the left"),
    "round_many": functools.partial(multiply, "fp8", MANY_ROWS, shape=(64, 1024)),
    "round_many_ragged": functools.partial(multiply, "fp8", MANY_ROWS, shape=(64, 1152)),
    "multiply_mxfp4": functools.partial(multiply, "mxfp4", 5),
    "multiply_one": functools.partial(multiply, "mxfp4", 1, shape=(OUT, 1536)),
    "multiply_two": functools.partial(multiply, "fp8", 2, shape=(OUT, 1280)),
    "multiply_small_blocks": functools.partial(multiply, "small blocks", 2, shape=(OUT, 1280)),
    "multiply_small_blocks_wide": functools.partial(multiply, "small blocks", 40),
    "multiply_long": functools.partial(multiply, "fp8", 5, shape=(64, 4608)),
    "multiply_bf16_rows": functools.partial(multiply, "mxfp4", 5, activations="bfloat16"),
    "multiply_tiles": functools.partial(multiply, "fp8", 300, tiling="tiles"),
    "multiply_splits": functools.partial(multiply, "mxfp4", 5, tiling="splits"),
    "multiply_bf16_rows_many": functools.partial(multiply, "fp8", 300, activations="bfloat16"),
    "gate_and_up": functools.partial(gate_and_up, "fp8", 5),
    "gate_and_up_narrow": functools.partial(gate_and_up, "fp8", NARROW),
    "gate_and_up_few": functools.partial(gate_and_up, "fp8", NARROW, tiling="few rows"),
    "gate_and_up_many": functools.partial(gate_and_up, "fp8", 300, tiling="rows on the left"),
    "experts_of_one": functools.partial(experts, 1),
    "experts_of_few": functools.partial(experts, 7),
    "experts_of_many": functools.partial(experts, 300),
    "experts_sorted": functools.partial(experts, MANY_TOKENS, dim=128),
    "experts_shared": functools.partial(experts, 7, shared=True),
    "experts_shared_one": functools.partial(experts, 1, dim=DIM, shared=True),
    "experts_shared_two": functools.partial(experts, 2, dim=DIM, shared=True),
    "unpack_experts": unpack,
    "pick_rounded": pick_rounded,
    "join": functools.partial(join, 3),
    "join_many": functools.partial(join, 19),
    "write": functools.partial(write, 3),
    "write_picked": functools.partial(write, 6, 512, picked=True),
    "write_many": functools.partial(write, MANY_TOKENS, 1024),
    "write_many_ragged": functools.partial(write, MANY_TOKENS, 1088),
    "pick": functools.partial(pick, 7),
    "pick_many": functools.partial(pick, 70),
}
