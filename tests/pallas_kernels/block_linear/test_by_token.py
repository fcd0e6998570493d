"""Products of groups, whose rows lie token by token, and of what they leave, group by group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from pallas_kernels import block_linear
from pallas_kernels.block_linear import block_linear_by_token
from pallas_kernels.common import weights
from pallas_kernels.common.pending import ByGroup, ByToken, finish
from pallas_kernels.product import decoded

GROUPS, INPUTS, RANK, OUT = 3, 512, 256, 128
ROUNDED_BY_CTAS, ROUNDED_BY_A_LAUNCH = 5, 11
"""Tokens; of more than eight a launch rounds the rows."""


@functools.cache
def make(activations, *shape):
    values = np.random.default_rng(len(shape)).normal(size=shape) * shape[-1] ** -0.5
    quantize = jax.jit(weights.quantize_block_fp8, static_argnames=("dtype", "activations"))
    return quantize(jnp.asarray(values, jnp.float32), dtype="bfloat16", activations=activations)


def draw(num_tokens, groups=GROUPS):
    """Heads of which no two groups, and no two tokens, are of one size."""
    rng = np.random.default_rng(0)
    scale = np.exp2(np.arange(num_tokens * groups) % 11 - 5.0).reshape(num_tokens, groups, 1)
    return jnp.asarray(rng.normal(size=(num_tokens, groups, INPUTS)) * scale, jnp.bfloat16)


def close(found, expected):
    """Sums of parts may be added in another order, and rounded otherwise then."""
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert np.all(np.abs(found - expected) <= 0.01 * largest)
    assert np.all(largest > 0)


@functools.partial(jax.jit, static_argnames="backend")
def project(x, first, second, *, backend):
    """Both products as a model has them, what lies between, and the second of plain rows."""
    run = functools.partial(block_linear, backend=backend)
    left = block_linear_by_token(x, first, backend=backend)
    if backend != "reference":
        assert isinstance(left, ByGroup)
    rows = finish(left)
    return rows, run(left, second), run(rows, second), run(x.swapaxes(0, 1), first)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu"])
@pytest.mark.parametrize("num_tokens", slow.all_but([5], [1, 2, 5, 8, 11, 64]))
def test_both_products_are_those_of_rows_that_were_moved(lane, num_tokens, backend):
    first, second = make("bfloat16", GROUPS, RANK, INPUTS), make("fp8", OUT, GROUPS * RANK)
    rows, found, expected, by_group = project(draw(num_tokens), first, second, backend=backend)
    np.testing.assert_array_equal(rows, by_group.swapaxes(0, 1).reshape(num_tokens, -1))
    close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [ROUNDED_BY_CTAS, ROUNDED_BY_A_LAUNCH])
def test_many_parts_are_added_before_they_are_rounded(lane, num_tokens):
    rng = np.random.default_rng(1)
    parts = rng.normal(size=(4, GROUPS, num_tokens, RANK)).astype(np.float32)
    parts[1:] *= [[[[100.0]]], [[[-100.0]]], [[[1e-3]]]]
    left = ByGroup(jnp.asarray(parts), jnp.dtype(jnp.bfloat16), (num_tokens,))
    second = make("fp8", OUT, GROUPS * RANK)
    multiply = jax.jit(functools.partial(block_linear, backend="mosaic_gpu"))
    close(multiply(left, second), multiply(left.value(), second))


def test_what_lies_otherwise_has_the_axes_of_what_it_stands_for():
    x = draw(2)
    assert ByToken(x).shape == (GROUPS, 2, INPUTS)
    np.testing.assert_array_equal(ByToken(x).value()[1, 0], x[0, 1])
    parts = jnp.arange(2.0 * GROUPS * 4 * 5).reshape(2, GROUPS, 4, 5)
    left = ByGroup(parts, jnp.dtype(jnp.float32), (4,))
    assert left.shape == (4, GROUPS * 5)
    assert left.reshape(2, -1, GROUPS * 5).shape == (2, 2, GROUPS * 5)
    np.testing.assert_array_equal(left.value()[3, 5:10], parts[:, 1, 3].sum(axis=0))
    np.testing.assert_array_equal(left.reshape(2, 2, -1).value()[1, 1], left.value()[3])
    rows = np.zeros((2, 3))
    assert finish(rows) is rows


def test_many_rows_are_moved_by_xla():
    """Which multiplies them."""
    x = draw(decoded.MANY_ROWS, groups=1)
    product = block_linear_by_token(x, make("bfloat16", 1, RANK, INPUTS))
    assert product.shape == (decoded.MANY_ROWS, RANK)
