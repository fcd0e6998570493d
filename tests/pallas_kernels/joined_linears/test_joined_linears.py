import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import tokens as cases
from helpers import slow
from pallas_kernels import joined_linears
from pallas_kernels.common.weights import FP8_BLOCK, BlockFP8, quantize_block_fp8

quantize = jax.jit(quantize_block_fp8, static_argnames=("dtype", "activations", "block"))
jit_joined_linears = jax.jit(joined_linears, static_argnames=("backend", "dtypes"))


def arguments(num_rows, dim, widths, dtype):
    """Positions that a table of three rows and one of five see in different rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_rows, dim)), dtype)
    weights = [jnp.asarray(rng.normal(size=(w, dim)) * dim**-0.5, dtype) for w in widths]
    biases = [jnp.asarray(rng.normal(size=(3 + 2 * i, w)), jnp.float32)
              for i, w in enumerate(widths)]  # fmt: skip
    return x, weights, [*biases[:-1], None], jnp.asarray(rng.integers(0, 99, num_rows), jnp.int32)


def oracle(x, weights, biases, positions):
    """In float64, row by row."""
    x, positions = np.asarray(x, np.float64), np.asarray(positions)
    for weight, bias in zip(weights, biases, strict=True):
        product = x @ np.asarray(weight, np.float64).T
        if bias is not None:
            product += np.asarray(bias, np.float64)[[p % len(bias) for p in positions]]
        yield product


def assert_close(found, given, bound=1e-5):
    """Within `bound` of the largest; sums of a card's tensor core lose more bits than f32's."""
    for mine, wanted in zip(found, oracle(*given), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, wanted, atol=bound * np.abs(wanted).max())


@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    slow.all_but(
        [(19, jnp.bfloat16)],
        [(1, jnp.bfloat16), (3, jnp.bfloat16), (19, jnp.bfloat16), (8, jnp.float32)],
    ),
)
def test_against_float64(lane, backend, num_rows, dtype):
    """Widths that are no multiple of a program's, and inputs that are no multiple of a run."""
    given = arguments(num_rows, 600, (20, 8, 9), dtype)
    assert_close(jit_joined_linears(*given, backend=backend), given)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("dim", [4096, 7168])
def test_kernel_at_real_shapes(num_rows, dim):
    given = arguments(num_rows, dim, (1024, 1024, 256, 256, 64), jnp.bfloat16)
    assert_close(jit_joined_linears(*given, backend="triton_gpu"), given, bound=1e-4)


def test_arguments_are_checked():
    x, weights, biases, positions = arguments(2, 64, (8, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"weights\[1\]"):
        joined_linears(x, [weights[0], weights[1][:, 1:]], biases, positions)
    with pytest.raises(ValueError, match=r"biases\[0\]"):
        joined_linears(x, weights, [biases[0][:, 1:], None], positions)
    with pytest.raises(ValueError, match="one for each weight"):
        joined_linears(x, weights, biases[:1], positions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "activations", "scale", "block"),
    slow.all_but(
        [(2, "fp8", jnp.uint8, 128)],
        [
            (2, "fp8", jnp.uint8, 128),
            (1, "bfloat16", jnp.uint8, 128),
            (1, "fp8", jnp.float32, 128),
            (1, "fp8", jnp.uint8, 32),
            (2, "bfloat16", jnp.uint8, 32),
        ],
    ),
)
def test_fp8_weights_join_the_dense_ones(lane, num_rows, activations, scale, block):
    """Row 0 ends in a group of zeros, and inputs are no multiple of a run.

    Groups of 32 inputs, and outputs, differ in size, so that no two neighbours share a scale.
    """
    x, weights, biases, positions = arguments(num_rows, 1280, (128, 256, 20), jnp.bfloat16)
    x = x.at[0, -128:].set(0) * jnp.bfloat16(2.0 ** (np.arange(1280)[None] // 32 % 7))
    options = {"dtype": "bfloat16", "activations": activations, "block": block}
    sizes = [jnp.bfloat16(2.0 ** (np.arange(len(w))[:, None] // 32 % 3)) for w in weights[:2]]
    weights[:2] = [
        quantize(w * 3 * size, **options) for w, size in zip(weights[:2], sizes, strict=True)
    ]
    if scale == jnp.float32:
        factors = jax.random.uniform(jax.random.key(0), weights[1].scale.shape, minval=0.5)
        weights[1] = dataclasses.replace(weights[1], scale=factors)
    given = x, weights, biases, positions
    dtypes = (jnp.bfloat16, jnp.float32, jnp.float32)
    found, expected = (
        jit_joined_linears(*given, dtypes=dtypes, backend=backend)
        for backend in ("triton_gpu", "reference")
    )
    for mine, wanted, dtype in zip(found, expected, dtypes, strict=True):
        assert mine.dtype == wanted.dtype == dtype
        bound = 2.0**-8 if dtype == jnp.bfloat16 else 1e-5
        mine, wanted = np.asarray(mine, np.float32), np.asarray(wanted, np.float32)
        np.testing.assert_allclose(mine, wanted, atol=bound * np.abs(wanted).max())


def test_fp8_weights_are_for_one_or_two_rows(lane):
    x, weights, biases, positions = arguments(3, 128, (128, 256), jnp.bfloat16)
    weights[0] = quantize(weights[0], dtype="bfloat16", activations="fp8")
    with pytest.raises(NotImplementedError, match="FP8 for at most 2 rows, got 3"):
        joined_linears(x, weights, biases, positions, backend="triton_gpu")


def _aot_case(num_rows, dim, block):
    def call(x, weights, biases, positions):
        return joined_linears(x, weights, biases, positions, backend="triton_gpu")

    def fp8(width):
        return BlockFP8(
            codes=jax.ShapeDtypeStruct((width, dim), jnp.float8_e4m3fn),
            scale=jax.ShapeDtypeStruct((width // block, dim // block), jnp.uint8),
            dtype="bfloat16",
            activations="fp8",
            block=block,
        )

    weights = [jax.ShapeDtypeStruct((w, dim), jnp.bfloat16) for w in cases.JOINED]
    biases = [jax.ShapeDtypeStruct((cases.POSITIONS, w), jnp.float32) for w in cases.JOINED]
    x = jax.ShapeDtypeStruct((num_rows, dim), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    biases[-1] = None
    name = f"{num_rows}x{dim}"
    if block:
        quantized = [fp8(width) for width in cases.JOINED_FP8]
        weights, biases = [*quantized, *weights], [*[None] * len(quantized), *biases]
        name += " with fp8" + (f" of {block}" if block != FP8_BLOCK else "")
    return (name, call, [x, weights, biases, positions])


AOT_CASES = [_aot_case(*case) for case in cases.COMPILED_JOINED]
