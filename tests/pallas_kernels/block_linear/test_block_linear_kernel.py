"""The kernel of products with quantised weights against the reference."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from pallas_kernels import block_linear
from pallas_kernels.block_linear import call_shapes, mosaic_gpu, reference
from pallas_kernels.block_linear.call_shapes import Tiling
from pallas_kernels.common import weights

QUANTIZE = {"fp8": weights.quantize_block_fp8, "mxfp4": weights.quantize_mxfp4}
TOLERANCE = 2e-5
"""Relative to the largest result: f32 sums in another order, and of the FP8 tensor core of a card
14 bits of 128 products."""
CARD_TOLERANCE = 1e-3


def make(kind, shape, activations="fp8"):
    values = np.random.default_rng(0).normal(size=shape) * shape[-1] ** -0.5
    values = jnp.asarray(values * 2.0 ** (np.arange(shape[-1]) // 32 % 5), jnp.float32)
    quantize = jax.jit(QUANTIZE[kind], static_argnames=("dtype", "activations"))
    return quantize(values, dtype="bfloat16", activations=activations)


def close(lane, found, expected):
    bound = TOLERANCE if lane == "interpreter" else CARD_TOLERANCE
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max())


@functools.partial(jax.jit, static_argnames="tiling")
def run(x, weight, tiling=None):
    return mosaic_gpu.block_linear(x, [weight], tiling=tiling)[0]


@pytest.mark.parametrize(
    ("kind", "activations"),
    slow.all_but(
        [("fp8", "bfloat16"), ("mxfp4", "fp8")],
        list(itertools.product(QUANTIZE, weights.ACTIVATIONS)),
    ),
)
def test_products_are_the_reference_s(lane, kind, activations):
    weight = make(kind, (192, 512), activations)
    x = jax.random.normal(jax.random.key(1), (5, 512)).astype(jnp.bfloat16)
    expected = block_linear(x, weight, dtype=jnp.float32, backend="reference")
    found = block_linear(x, weight, dtype=jnp.float32, backend="mosaic_gpu")
    close(lane, found, expected)


TILINGS = [Tiling(8, 1, 2), Tiling(16, 2, 2), Tiling(8, 2, 3, splits=2), Tiling(32, 1, 4, splits=4)]


@pytest.mark.parametrize(
    ("kind", "tiling"),
    slow.all_but(
        [("fp8", TILINGS[2])],
        list(itertools.product(QUANTIZE, TILINGS)),
    ),
    ids=str,
)
def test_any_tiling_gives_the_products_of_every_group(lane, kind, tiling):
    weight = make(kind, (2, 128, 512))
    x = jax.random.normal(jax.random.key(1), (2, 11, 512)).astype(jnp.bfloat16)
    close(lane, run(x, weight, tiling), reference.block_linear(x, weight))


@pytest.mark.parametrize(
    "shape", [(200, 130), pytest.param((40, 96), marks=pytest.mark.slow)], ids=str
)
def test_mxfp4_of_any_width(lane, shape):
    weight = make("mxfp4", shape)
    x = jax.random.normal(jax.random.key(1), (3, shape[1])).astype(jnp.bfloat16)
    found = block_linear(x, weight, dtype=jnp.float32, backend="mosaic_gpu")
    close(lane, found, block_linear(x, weight, dtype=jnp.float32, backend="reference"))


@pytest.mark.slow
def test_fp8_scales_may_be_any_f32(lane):
    weight = make("fp8", (128, 256))
    scale = jax.random.uniform(jax.random.key(5), weight.scale.shape, minval=0.5, maxval=2)
    weight = dataclasses.replace(weight, scale=scale)
    x = jax.random.normal(jax.random.key(1), (3, 256)).astype(jnp.bfloat16)
    close(
        lane,
        run(x[None], weight_stack(weight)),
        reference.block_linear(x[None], weight_stack(weight)),
    )


def weight_stack(weight):
    return jax.tree.map(lambda leaf: leaf[None], weight)


def test_a_nan_stays_in_its_row(lane):
    weight = weight_stack(make("mxfp4", (128, 256)))
    x = jax.random.normal(jax.random.key(1), (1, 4, 256)).astype(jnp.bfloat16)
    clean = run(x, weight)
    found = np.asarray(run(x.at[0, 2, 7].set(jnp.nan), weight))
    assert np.all(np.isnan(found[0, 2]))
    rest = np.array([0, 1, 3])
    np.testing.assert_array_equal(found[0, rest], np.asarray(clean)[0, rest])


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_place(lane):
    weight = weight_stack(make("fp8", (128, 512), "bfloat16"))
    x = jax.random.normal(jax.random.key(1), (1, 12, 512)).astype(jnp.bfloat16)
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_array_equal(run(x[:, order], weight), np.asarray(run(x, weight))[:, order])


def test_what_the_kernel_cannot_serve_is_refused_by_name():
    x = jnp.zeros((1, 2, 96))
    for weight, message in (
        (jnp.zeros((64, 96)), "a dense one"),
        (make("fp8", (64, 96)), "multiples of 64 x 128"),
        (make("mxfp4", (64, 96), "bfloat16"), "bfloat16 alone, got float32"),
    ):
        assert message in call_shapes.find_obstacle(x, weight)


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 8192])
@pytest.mark.parametrize("is_mxfp4", [False, True])
@pytest.mark.parametrize("num_weights", [1, 2])
def test_every_tiling_fits_shared_memory(rows, is_mxfp4, num_weights):
    for num_blocks, num_tiles in ((32, 8), (8, 512), (64, 64), (32, 16), (12, 1024)):
        for parts in (1, 2):
            is_gated = num_weights == 2
            tiles = (num_tiles,) * num_weights
            shapes = call_shapes.Shapes(num_blocks, tiles, parts, is_gated, is_mxfp4)
            tiling = call_shapes.choose_tiling(shapes, rows, 1, may_split=num_weights == 1)
            used = tiling.stages * shapes.stage_bytes(tiling)
            used += 256 * tiling.columns * is_gated
            assert used < 230_000
            assert num_blocks % (tiling.blocks * tiling.splits) == 0
            assert tiling.stages >= 2
            assert tiling.columns * parts <= 256


def _specs(kind, rows, out, into, activations="fp8"):
    def shape(*size, dtype):
        return jax.ShapeDtypeStruct(size, dtype)

    if kind == "fp8":
        weight = weights.BlockFP8(
            codes=shape(1, out, into, dtype=jnp.float8_e4m3fn),
            scale=shape(1, out // 128, into // 128, dtype=jnp.uint8),
            dtype="bfloat16",
            activations=activations,
        )
    else:
        weight = weights.MXFP4(
            codes=shape(1, out // 64, into // 128, 64, 64, dtype=jnp.uint8),
            scale=shape(1, out // 64, into // 128, 64, dtype=jnp.int32),
            size=(out, into),
            dtype="bfloat16",
            activations=activations,
        )
    return [shape(1, rows, into, dtype=jnp.bfloat16), weight]


def _product(x, weight):
    return block_linear(x, weight, backend="mosaic_gpu")


AOT_CASES = [
    (
        f"{kind} {rows}x{out}x{into} {activations}@sm_90a",
        _product,
        _specs(kind, rows, out, into, activations),
    )
    for kind, rows, out, into, activations in (
        ("fp8", 1, 32768, 1024, "fp8"),
        ("fp8", 64, 4096, 8192, "bfloat16"),
        ("fp8", 8192, 4096, 8192, "fp8"),
        ("mxfp4", 8192, 4096, 2048, "fp8"),
    )
]
