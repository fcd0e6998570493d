"""Roundings that stay, on every device; NumPy's are IEEE's."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.rounding import exact_divide, round_to, rounded


def draw(spread, count=500_000, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=count) * 2.0 ** rng.uniform(-spread, spread, count)).astype(np.float32)


@pytest.mark.parametrize("spread", [1, 30])
def test_exact_divide_is_the_ieee_quotient(spread):
    x, divisor = draw(spread), np.abs(draw(spread, seed=1)) + np.float32(1e-9)
    np.testing.assert_array_equal(jax.jit(exact_divide)(x, divisor), x / divisor)
    np.testing.assert_array_equal(jax.jit(exact_divide)(x, -divisor), x / -divisor)


def test_a_zero_keeps_its_sign():
    quotients = exact_divide(jnp.asarray([0.0, -0.0]), jnp.asarray([3.0, 3.0]))
    np.testing.assert_array_equal(np.signbit(quotients), [False, True])


@pytest.mark.parametrize("divisor", [448.0, 6.0, 3.0, 2.0**-9])
def test_exact_divide_by_one_number_is_no_product_with_its_reciprocal(divisor):
    x, divisor = draw(8), np.float32(divisor)
    np.testing.assert_array_equal(jax.jit(lambda x: exact_divide(x, divisor))(x), x / divisor)
    if divisor > 1:
        assert np.any(x * (np.float32(1) / divisor) != x / divisor), "the inputs can tell"


def test_rounding_to_bf16_and_back_is_not_left_out():
    x = draw(20)
    there_and_back = jax.jit(lambda x: round_to(x, jnp.bfloat16).astype(jnp.float32))
    expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(there_and_back(x), expected.astype(np.float32))
    assert round_to(jnp.asarray(x), jnp.bfloat16).dtype == jnp.bfloat16


def test_a_wider_dtype_takes_values_as_they_are():
    x = jnp.asarray(draw(3, count=100), jnp.bfloat16)
    np.testing.assert_array_equal(round_to(x, jnp.float32), x.astype(jnp.float32))
    np.testing.assert_array_equal(round_to(x, jnp.bfloat16), x)


@pytest.mark.parametrize("count", [1, 3, 17, 4096])
def test_a_rounded_product_is_not_fused_into_a_sum(count):
    a, b, c = (draw(2, count, seed) for seed in range(3))
    total = jax.jit(lambda a, b, c: rounded(a * b) + c)(a, b, c)
    np.testing.assert_array_equal(total, a * b + c)


def test_rounded_passes_everything_through():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5], np.float32)
    np.testing.assert_array_equal(rounded(jnp.asarray(x)), x)
    assert np.signbit(rounded(jnp.asarray(x))[1])
