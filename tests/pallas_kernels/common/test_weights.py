"""Quantised weights: what their bytes mean, and that rearranging them loses none."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import weights
from pallas_kernels.common.weights import MXFP4, BlockFP8

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
SIZES = [(64, 128), (1, 2), (48, 64), (65, 130), (3, 200, 96)]

from_stored = jax.jit(functools.partial(MXFP4.from_stored, dtype="bfloat16"))
to_stored, decode = jax.jit(MXFP4.to_stored), jax.jit(lambda weight: weight.decode())
quantize_block_fp8, quantize_mxfp4 = (
    jax.jit(functools.partial(quantize, dtype="float32"))
    for quantize in (weights.quantize_block_fp8, weights.quantize_mxfp4)
)


def random_mxfp4(rng, shape):
    pairs = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    scale = rng.integers(100, 150, (*shape[:-1], -(-shape[-1] // 32)), np.uint8)
    return pairs, scale


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_mxfp4_means_what_the_release_says_and_keeps_every_byte(shape):
    pairs, scale = random_mxfp4(np.random.default_rng(0), shape)
    weight = from_stored(pairs, scale)
    assert weight.shape == shape
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(shape)
    factor = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1)[..., : shape[-1]]
    np.testing.assert_array_equal(decode(weight), E2M1[codes] * factor)
    for stored, given in zip(to_stored(weight), (pairs, scale), strict=True):
        np.testing.assert_array_equal(stored, given)


@pytest.mark.parametrize("scale_dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(128, 256), (1, 1), (130, 129), (2, 300, 64)], ids=str)
def test_block_fp8_means_what_the_release_says(shape, scale_dtype):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, shape, np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).view(ml_dtypes.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scale = rng.integers(110, 140, blocks, np.uint8)
    factor = 2.0 ** (scale.astype(np.float64) - 127)
    if scale_dtype == np.float32:
        scale = factor = rng.uniform(0.5, 2, blocks).astype(np.float32)
    weight = BlockFP8(
        codes=jnp.asarray(codes), scale=jnp.asarray(scale), dtype="bfloat16", activations="fp8"
    )
    wide = np.repeat(np.repeat(factor, 128, axis=-2), 128, axis=-1)[..., : shape[-2], : shape[-1]]
    np.testing.assert_array_equal(decode(weight), (codes.astype(np.float32) * wide).astype("f4"))


@pytest.mark.parametrize("quantize", [quantize_block_fp8, quantize_mxfp4], ids=["fp8", "mxfp4"])
def test_quantising_what_is_quantised_changes_no_bit(quantize):
    values = np.random.default_rng(2).normal(size=(3, 200, 160)).astype(np.float32)
    values *= np.exp2(np.arange(200)[:, None] % 9 - 20).astype(np.float32)
    once = quantize(values)
    decoded = np.asarray(decode(once))
    np.testing.assert_array_equal(decoded, decode(quantize(decoded)))
    assert 0 < np.abs(decoded - values).max() < 0.26 * np.abs(values).max()


def test_scales_are_the_least_at_which_no_code_saturates():
    values = np.zeros((128, 128), np.float32)
    values[5, 7] = 448
    for factor, code in ((1.0, 127), (1.001, 128), (0.5, 126)):
        assert np.asarray(quantize_block_fp8(values * np.float32(factor)).scale)[0, 0] == code
    values = np.zeros((2, 64), np.float32)
    values[1, 40] = 6
    for factor, code in ((1.0, 127), (1.001, 128), (0.5, 126)):
        _, scale = to_stored(quantize_mxfp4(values * np.float32(factor)))
        assert np.asarray(scale)[1, 1] == code


@pytest.mark.slow
def test_a_layer_of_a_stack_is_a_weight():
    stack = quantize_mxfp4(jax.random.normal(jax.random.key(0), (3, 4, 96, 64)))
    layer = jax.tree.map(lambda leaf: leaf[1], stack)
    assert layer.shape == (4, 96, 64)
    np.testing.assert_array_equal(decode(layer), decode(stack)[1])


def test_activations_are_changed_in_every_quantised_weight_of_a_tree():
    values = jnp.ones((64, 64))
    tree = {
        "dense": values,
        "fp8": quantize_block_fp8(values),
        "fp4": [quantize_mxfp4(values)],
    }
    changed = weights.with_activations(tree, "bfloat16")
    assert changed["fp8"].activations == changed["fp4"][0].activations == "bfloat16"
    assert changed["dense"] is values
    with pytest.raises(ValueError, match="activations must be one of"):
        weights.with_activations(tree, "int8")
