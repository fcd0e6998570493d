"""Sums over splits, normed or not, against the same in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_linears
from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.product.triton_split_k import add_splits

EPS = 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_results_are_the_sums_and_one_of_them_is_normed(lane, dtype):
    rng = np.random.default_rng(0)
    sums = jnp.asarray(rng.normal(size=(4, 3, 96 + 40)), jnp.float32)
    norm = jnp.asarray(rng.normal(size=96) / 4 + 1, dtype)
    finish = functools.partial(add_splits, widths=(96, 40), eps=EPS, dtype=dtype)
    normed, plain = jax.jit(lambda sums, norm: finish(sums, norms=[norm, None]))(sums, norm)
    added = np.asarray(jnp.sum(sums, axis=0).astype(dtype), np.float64)
    square = np.mean(added[:, :96] ** 2, axis=1, keepdims=True)
    expected = added[:, :96] / np.sqrt(square + EPS) * np.asarray(norm, np.float64)
    ulp = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(plain, np.float64), added[:, 96:], rtol=ulp, atol=1e-6)
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=2 * ulp, atol=1e-6)


@pytest.mark.slow
def test_the_op_norms_what_it_is_told_to():
    keys = jax.random.split(jax.random.key(0), 4)
    x, *weights = (jax.random.normal(key, (n, 64)) for key, n in zip(keys, (3, 8, 6), strict=False))
    norm = jax.random.normal(keys[3], (6,))
    first, second = block_linears(x, weights, norms=[None, norm], eps=EPS)
    plain = block_linears(x, weights)
    np.testing.assert_array_equal(first, plain[0])
    np.testing.assert_array_equal(second, rms_norm(plain[1], norm, eps=EPS))
    with pytest.raises(ValueError, match="norms must be one for each weight"):
        block_linears(x, weights, norms=[norm])
    with pytest.raises(ValueError, match="norms"):
        block_linears(x, weights, norms=[norm, None])
