"""Rows that the product's kernel rounds: one or two of them by other warps than many."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from helpers.quantised import quantize
from pallas_kernels.block_linear import reference
from pallas_kernels.common import weights
from pallas_kernels.common.pending import SplitSums
from pallas_kernels.product import Tiling, multiply_rows, shapes_of

OUT, MOST = 128, 5
CARD_TOLERANCE, TOLERANCE = 1e-3, 2e-5
"""Relative to the largest result, as in `test_block_linear_kernel`."""


@functools.cache
def make(kind, inputs, activations):
    values = np.random.default_rng(0).normal(size=(1, OUT, inputs)) * inputs**-0.5
    return quantize(kind, values.astype(np.float32), activations=activations)


def draw(inputs):
    """Rows whose groups of 128 inputs have scales of their own."""
    rng = np.random.default_rng(1)
    scales = np.repeat(np.exp2(rng.integers(-6, 6, (MOST, inputs // 128))), 128, axis=1)
    return jnp.asarray(rng.normal(size=(MOST, inputs)) * scales, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="splits")
def multiply(x, weight, *, splits):
    shapes = shapes_of(weight)
    tiling = Tiling(shapes.core.min_tile_m, tile_k=128, stages=2, split_k=splits)
    return multiply_rows(x, [weight], tiling=tiling)[0][0]


CASES = list(
    itertools.product(["fp8", "mxfp4"], weights.ACTIVATIONS, (512, 768, 1280, 1536), (1, 2))
)
USUAL = [("mxfp4", "fp8", 1280, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "activations", "inputs", "splits"), slow.all_but(USUAL, CASES))
def test_a_row_is_the_same_in_any_company(lane, kind, activations, inputs, splits):
    """Its groups are four or two at a time, or one; 4 to 12 of them make units that are not all."""
    weight, x = make(kind, inputs, activations), draw(inputs)
    expected = np.asarray(jax.jit(reference.block_linear)(x[None], weight)[0], np.float64)
    bound = TOLERANCE if lane == "interpreter" else CARD_TOLERANCE
    together = multiply(x[None], weight, splits=splits)
    np.testing.assert_allclose(together, expected, atol=bound * np.abs(expected).max())
    for first, count in ((0, 1), (3, 1), (0, 2), (2, 2), (1, 3)):
        some = slice(first, first + count)
        found = multiply(x[None, some], weight, splits=splits)
        np.testing.assert_array_equal(found, together[some])


@pytest.mark.slow
@pytest.mark.parametrize("count", slow.all_but([1], [1, 2, MOST]))
def test_rows_in_parts_are_added_first(lane, count):
    """In the order of the parts, then rounded to bf16."""
    weight, x = make("fp8", 1536, "fp8"), draw(1536)[:count]
    parts = jnp.stack([x, x * 0.5, -x * 0.375]).astype(jnp.float32)
    added = ((parts[0] + parts[1]) + parts[2]).astype(jnp.bfloat16)
    sums = SplitSums(parts, jnp.dtype(jnp.bfloat16)).reshape(1, count, -1)
    found = multiply(sums, weight, splits=1)
    np.testing.assert_array_equal(found, multiply(added[None], weight, splits=1))


@pytest.mark.slow
@pytest.mark.parametrize("inputs", slow.all_but([2304], [2304, 4096]))
def test_many_groups_are_rounded_in_a_loop(lane, inputs):
    """Of 18 groups, the last round has some beyond the last."""
    weight, x = make("fp8", inputs, "fp8"), draw(inputs)
    expected = np.asarray(jax.jit(reference.block_linear)(x[None], weight)[0], np.float64)
    bound = TOLERANCE if lane == "interpreter" else CARD_TOLERANCE
    found = multiply(x[None], weight, splits=1)
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max())
