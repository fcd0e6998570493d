"""Rounding of activations, bit for bit against the released rule in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import rows

round_rows, quantize_rows = jax.jit(rows.round_rows), jax.jit(rows.quantize_rows)
decode_rows = jax.jit(rows.decode_rows, static_argnums=1)
TIES = np.array([1.0625, 1.1875, 17 / 512, 2.0**-10, 3 * 2.0**-10, 447, 448, 0.4375, -1.0625])


def expected(x):
    """Values of [..., n], n at most 128, by the rule: E4M3 of x over a power of two, times it."""
    x = np.asarray(x, np.float32)
    finite = np.where(np.isnan(x), 0, np.abs(x))
    amax = np.minimum(
        np.maximum(finite.max(axis=-1, keepdims=True), np.float32(1e-4)), 3.4028235e38
    )
    ratio = amax.astype(np.float32) * (np.float32(1) / np.float32(448))
    scale = np.exp2(np.ceil(np.log2(ratio.astype(np.float64))))
    codes = np.clip(x.astype(np.float64) / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * scale


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 300.0, 1e20])
def test_values_are_those_of_the_rule(size, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 128)) * size, dtype)
    np.testing.assert_array_equal(np.asarray(round_rows(x), np.float64), expected(x))


def test_a_scale_for_128_inputs_rounds_as_one_for_32_does():
    """But for values that are less than 2^-13 of the largest, which then differ by 2^-16 of it."""
    rng = np.random.default_rng(3)
    sizes = np.exp2(rng.uniform(-24, 0, (5000, 4, 1)))
    x = jnp.asarray((rng.normal(size=(5000, 4, 32)) * sizes).reshape(5000, 128), jnp.bfloat16)
    by_32 = np.asarray(jax.jit(rows.round_rows, static_argnums=1)(x, 32), np.float64)
    by_128, exact = np.asarray(round_rows(x), np.float64), np.abs(np.asarray(x, np.float64))
    largest = np.maximum(exact.max(axis=1, keepdims=True), 1e-4)
    is_small = exact < 2.0**-13 * largest
    np.testing.assert_array_equal(by_32[~is_small], by_128[~is_small])
    off = np.abs(by_32 - by_128) / largest
    assert off.max() <= 2.0**-16
    assert off.max() > 2.0**-20


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_that_are_rounded_again_are_the_same(dtype):
    """So they can be sent in E4M3 to experts that round what they get."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 128)) * np.exp2(rng.uniform(-30, 30, (2000, 1)))
    x[:1000] *= np.exp2(rng.uniform(-20, 0, (1000, 128)))  # many codes below E4M3's normal ones
    x[500:1500, 0] = np.exp2(rng.integers(-20, 20, 1000)) * rng.uniform(215, 460, 1000)
    x[:4, 3] = 0, np.nan, np.inf, -np.inf
    once = round_rows(jnp.asarray(x, dtype))
    values = np.asarray(once, np.float32)
    np.testing.assert_array_equal(np.asarray(round_rows(once), np.float32), values)
    sent = quantize_rows(jnp.asarray(x, dtype))
    assert (np.asarray(sent.scale) != np.asarray(quantize_rows(once).scale)).any()
    np.testing.assert_array_equal(decode_rows(sent, 128), values)


@pytest.mark.parametrize("power", [-20, -3, 0, 5])
def test_ties_go_to_the_even_code(power):
    x = np.zeros((1, 128), np.float32)
    x[0, : len(TIES)] = TIES
    x[0, 100] = 448
    x = np.ldexp(x, power)
    np.testing.assert_array_equal(np.asarray(round_rows(jnp.asarray(x))), expected(x))


def test_rows_of_zeros_nan_and_infinities():
    x = np.zeros((4, 256), np.float32)
    x[1, 3], x[2, 200], x[3, 130] = np.nan, np.inf, -0.0
    x[1, 4] = 2.0
    rounded = np.asarray(round_rows(jnp.asarray(x)))
    np.testing.assert_array_equal(rounded[0], 0)
    assert np.isnan(rounded[1, 3])
    assert rounded[1, 4] == 2.0
    assert np.isnan(rounded[1]).sum() == 1
    assert rounded[2, 200] > 1e38
    np.testing.assert_array_equal(rounded[2, :200], 0)
    scale = np.asarray(quantize_rows(jnp.asarray(x)).scale)
    assert scale[0].tolist() == [105, 105]  # 1e-4 / 448, rounded up to a power of two


def test_groups_are_of_128_inputs_and_a_short_one_is_filled_up():
    x = np.full((1, 200), 1e-3, np.float32)
    x[0, 5] = 448.0
    rounded = np.asarray(round_rows(jnp.asarray(x)))
    np.testing.assert_array_equal(rounded[0, :128], expected(x[:, :128])[0])
    np.testing.assert_array_equal(rounded[0, 128:], expected(x[:, 128:])[0])
    assert quantize_rows(jnp.asarray(x)).codes.shape == (1, 2, 128)
