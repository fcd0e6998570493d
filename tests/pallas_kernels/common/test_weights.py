"""Quantised weights: what their bytes mean, and that rearranging them loses none."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import block_linear
from pallas_kernels.block_linear import reference
from pallas_kernels.common import weights
from pallas_kernels.common.weights import MXFP4, BlockFP8
from pallas_kernels.joined_linears import triton_gpu
from pallas_kernels.product import find_obstacle

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
SIZES = [(64, 128), (1, 2), (48, 64), (65, 130), (3, 200, 96)]

from_stored = jax.jit(functools.partial(MXFP4.from_stored, dtype="bfloat16"))
to_stored, decode = jax.jit(MXFP4.to_stored), jax.jit(lambda weight: weight.decode())
quantize_block_fp8, quantize_mxfp4 = (
    functools.partial(jax.jit(quantize, static_argnames=names), dtype="float32")
    for quantize, names in (
        (weights.quantize_block_fp8, ("dtype", "block")),
        (weights.quantize_mxfp4, ("dtype", "row_group")),
    )
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


def test_blocks_of_32_are_decoded_quantised_and_multiplied_by_their_own_scales():
    """DeepSeek-V4.1: a scale for 32 x 32 codes, and one for 32 inputs of a row."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(70, 160)).astype(np.float32)
    values *= np.exp2(np.arange(160)[None] // 32 * 7 - 20).astype(np.float32)
    quantize = functools.partial(weights.quantize_block_fp8, dtype="float32", block=32)
    weight = jax.jit(quantize)(values)
    assert weight.scale.shape == (3, 5)
    scale = 2.0 ** (np.asarray(weight.scale, np.float64) - 127)
    wide = np.repeat(np.repeat(scale, 32, axis=0)[:70], 32, axis=1)
    decoded = np.asarray(decode(weight), np.float64)
    np.testing.assert_array_equal(decoded, np.asarray(weight.codes, np.float64) * wide)
    worst = np.abs(decoded - values).reshape(70, 5, 32).max((0, 2))
    assert (worst < 0.07 * np.abs(values).reshape(70, 5, 32).max((0, 2))).all()

    rows = (rng.normal(size=(3, 160)) * np.exp2(20 - 7 * (np.arange(160) // 32))).astype(np.float32)
    found = jax.jit(reference.block_linear)(
        rows[None], jax.tree.map(lambda leaf: leaf[None], weight)
    )
    groups = rows.astype(np.float64).reshape(3, 5, 32)
    steps = 2.0 ** np.ceil(np.log2(np.abs(groups).max(-1, keepdims=True) / 448))
    rounded = (groups / steps).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * steps
    np.testing.assert_allclose(found[0], rounded.reshape(3, 160) @ decoded.T, atol=1e-4)
    by_128 = dataclasses.replace(weight, activations="bfloat16")
    plain = jax.jit(reference.block_linear)(
        rows[None], jax.tree.map(lambda leaf: leaf[None], by_128)
    )
    np.testing.assert_allclose(plain[0], rows.astype(np.float64) @ decoded.T, atol=1e-4)


def test_kernels_for_blocks_of_128_take_no_others():
    x = jax.ShapeDtypeStruct((2, 128), jnp.bfloat16)
    values = np.ones((128, 128), np.float32)
    fp8 = quantize_block_fp8(values, dtype="bfloat16", block=32)
    assert "got blocks of 32" in find_obstacle(x, fp8)
    assert triton_gpu.find_obstacle(x, [fp8]) is None
    more = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16)
    assert "for at most 2 rows, got 3" in triton_gpu.find_obstacle(more, [fp8])
    # Rows that MXFP4 rounds by 32 inputs may have a scale for 128 of them.
    fp4 = quantize_mxfp4(values, dtype="bfloat16", row_group=32)
    assert find_obstacle(x, fp4) is None
    for weight in (fp8, fp4):
        assert weight.row_group == 32


def test_blocks_of_another_size_are_refused():
    weight = quantize_block_fp8(np.ones((64, 64), np.float32), block=32)
    rows = np.ones((1, 64), np.float32)
    with pytest.raises(ValueError, match=r"weight\.block must be one of \(128, 32\), got 64"):
        block_linear(rows, dataclasses.replace(weight, block=64))
    with pytest.raises(ValueError, match=r"weight\.scale must be uint8 or float32\[1, 1\]"):
        block_linear(rows, dataclasses.replace(weight, block=128))
