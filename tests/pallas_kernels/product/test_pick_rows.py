"""Rows that are rounded first and picked then, against rows that are rounded as they are picked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import product as cases
from helpers import slow
from helpers.quantised import quantize
from pallas_kernels.product import triton_rows

NUM_ROWS, PICKED, SPARE = 30, 45, 3


@functools.cache
def make(kind, activations, dim):
    return quantize(kind, np.zeros((128, dim), np.float32), activations=activations)


@functools.partial(jax.jit, static_argnames="is_rounded")
def pick(x, weight, token, num_used=None, *, is_rounded):
    options = {"num_spare": SPARE, "token": token, "num_used": num_used}
    if not is_rounded:
        return triton_rows.make_rows(x, weight, **options)
    return triton_rows.pick_rows(triton_rows.make_rows(x, weight, num_spare=0), **options)


def draw(dim):
    """Rows, and which are picked, some several times."""
    rng = np.random.default_rng(0)
    scales = np.exp2(rng.integers(-9, 9, (NUM_ROWS, 1)))
    x = jnp.asarray(rng.normal(size=(NUM_ROWS, dim)) * scales, jnp.bfloat16)
    return x, jnp.asarray(rng.integers(0, NUM_ROWS, PICKED), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "activations", "dim"),
    slow.all_but(
        [("fp8", "fp8", 2176)],
        [("fp8", "fp8", 2176), ("fp8", "bfloat16", 256), ("mxfp4", "fp8", 384)],
    ),
)
def test_codes_and_scales_are_the_same(lane, kind, activations, dim):
    """2,176 inputs take two programs, one of which has a group."""
    del lane
    (x, token), weight = draw(dim), make(kind, activations, dim)
    found, wanted = (pick(x, weight, token, is_rounded=is_rounded) for is_rounded in (True, False))
    assert found.codes.shape == wanted.codes.shape
    codes = [np.asarray(rows.codes).view(np.uint8)[:, :PICKED] for rows in (found, wanted)]
    np.testing.assert_array_equal(*codes)
    np.testing.assert_array_equal(found.scale[..., :PICKED], wanted.scale[..., :PICKED])
    assert len(np.unique(codes[1])) > 100


@pytest.mark.slow
@pytest.mark.parametrize("num_used", [0, 17])
def test_rows_that_nobody_reads_are_not_picked(lane, num_used):
    """But for those that share a program with one that is read; the others are as they were."""
    (x, token), weight = draw(256), make("fp8", "fp8", 256)
    found, every = (pick(x, weight, token, n, is_rounded=True) for n in (jnp.int32(num_used), None))
    codes, wanted = (np.asarray(rows.codes[0]).view(np.uint8) for rows in (found, every))
    np.testing.assert_array_equal(codes[:num_used], wanted[:num_used])
    np.testing.assert_array_equal(found.scale[0, :, :num_used], every.scale[0, :, :num_used])
    first = -(-num_used // triton_rows._PICKED_ROWS) * triton_rows._PICKED_ROWS
    if lane == "interpreter":  # which makes results of one byte over and over
        assert len(np.unique(codes[first:])) == 1


def _aot_case(num_rows, dim, picked):
    """Flash's rows of a prompt, each picked six times."""
    rows = triton_rows.Rows(
        jax.ShapeDtypeStruct((1, num_rows, dim), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((1, dim // 128, num_rows), jnp.float32),
    )
    token = jax.ShapeDtypeStruct((picked,), jnp.int32)
    run = functools.partial(triton_rows.pick_rows, num_spare=128)
    return f"{picked} of {num_rows}x{dim}", run, [rows, token]


AOT_CASES = [_aot_case(*cases.COMPILED_PICKS)]
