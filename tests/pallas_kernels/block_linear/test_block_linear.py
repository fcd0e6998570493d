"""Products of rows with dense and quantised weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from helpers.quantised import KINDS, quantize
from pallas_kernels import block_linear
from pallas_kernels.common import rows, weights


def make(kind, shape, seed=0, activations="fp8"):
    values = np.random.default_rng(seed).normal(size=shape) * shape[-1] ** -0.5
    return quantize(kind, values.astype(np.float32), dtype="float32", activations=activations)


@pytest.mark.parametrize(
    ("lead", "kind", "activations"),
    slow.all_but(
        [("one", "fp8", "fp8"), ("groups", "mxfp4", "bfloat16"), ("groups", "dense", "fp8")],
        list(itertools.product(["one", "groups"], KINDS, weights.ACTIVATIONS)),
    ),
)
def test_against_float64(lead, kind, activations):
    lead = () if lead == "one" else (3,)
    weight = make(kind, (*lead, 200, 160), activations=activations)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(*lead, 7, 160)), jnp.float32)
    taken = jax.jit(rows.round_rows)(x) if activations == "fp8" and kind != "dense" else x
    matrix = np.asarray(jax.jit(weights.decode_weight)(weight), np.float64)
    expected = np.asarray(taken, np.float64) @ matrix.swapaxes(-1, -2)
    found = jax.jit(block_linear)(x, weight)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_a_row_alone_has_the_bits_that_it_has_among_others():
    weight, x = make("mxfp4", (96, 256)), jax.random.normal(jax.random.key(3), (8, 256))
    together = block_linear(x, weight)
    for row in range(8):
        np.testing.assert_array_equal(block_linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.slow
def test_the_result_has_the_dtype_that_is_asked_for():
    x = jnp.ones((2, 64), jnp.bfloat16)
    assert block_linear(x, make("fp8", (8, 64))).dtype == jnp.bfloat16
    assert block_linear(x, make("fp8", (8, 64)), dtype=jnp.float32).dtype == jnp.float32


def test_shapes_that_do_not_fit_are_named():
    weight = make("fp8", (8, 64))
    with pytest.raises(ValueError, match=r"x must be \[T, in\].*weight.shape=\(8, 64\)"):
        block_linear(jnp.ones((1, 2, 64)), weight)
    with pytest.raises(ValueError, match=r"must agree on their inputs.*x.shape=\(2, 32\)"):
        block_linear(jnp.ones((2, 32)), weight)
