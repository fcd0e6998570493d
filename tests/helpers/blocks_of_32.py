"""Weights in FP8 with scales of 32 x 32, rows for them, and how close products are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import block_linear
from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import BlockFP8, quantize_block_fp8

TOLERANCE, CARD_TOLERANCE = 3e-6, 1e-4
"""Relative to the largest result: exact products, added in another order; tensor cores cut off what
a sum has no bits for."""
BLOCK = 32


def make(shape, activations="fp8", block=BLOCK, seed=0):
    """A weight whose blocks have scales that differ by up to 2^9, in either direction."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * shape[-1] ** -0.5
    *_, out, into = shape
    rows, columns = np.arange(out) // 32 % 4, np.arange(into) // 32 % 7
    values = values * 2.0 ** (rows[:, None] + columns)
    return quantize(values.astype(np.float32), activations=activations, block=block)


quantize = jax.jit(
    functools.partial(quantize_block_fp8, dtype="bfloat16"),
    static_argnames=("activations", "block"),
)


def normal(*shape, seed=1):
    """Rows whose groups of 32 have sizes that differ by up to 2^6."""
    size = 2.0 ** (np.arange(shape[-1]) // 32 % 7)
    return (np.random.default_rng(seed).normal(size=shape) * size).astype(jnp.bfloat16)


def close(found, expected):
    expected = np.asarray(expected, np.float64)
    tolerance = TOLERANCE if interpreting() else CARD_TOLERANCE
    bound = tolerance * np.abs(expected).max()
    assert np.abs(np.asarray(found, np.float64) - expected).max() < bound


multiply = jax.jit(block_linear, static_argnames=("dtype", "backend"))


def specs(shape, activations="fp8"):
    *lead, out, into = shape
    return BlockFP8(
        codes=jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn),
        scale=jax.ShapeDtypeStruct((*lead, out // BLOCK, into // BLOCK), jnp.uint8),
        dtype="bfloat16",
        activations=activations,
        block=BLOCK,
    )
