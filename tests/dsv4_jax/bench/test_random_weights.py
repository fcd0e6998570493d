"""Random parameters of the benchmarks: the shapes, formats and statistics of real ones."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench.weights import _random_bytes, _random_scales, _random_weight, random_params
from dsv4_jax.model.released import quantized_shape
from dsv4_jax.model.weight_sizes import walk_weights
from helpers import serving, slow, v41
from pallas_kernels.common.weights import MXFP4, BlockFP8, is_quantized

pytestmark = pytest.mark.unoptimised


@functools.cache
def released():
    return random_params(serving.EVERY_TYPE, weights="stored")


@pytest.mark.slow
def test_shapes_are_those_of_released_weights():
    expected = ds.unstack_layers(
        ds.model.param_shapes(serving.EVERY_TYPE, jnp.bfloat16, weights="stored")
    )
    assert jax.tree.structure(released()) == jax.tree.structure(expected)
    for (path, leaf), (_, shape) in zip(
        jax.tree_util.tree_leaves_with_path(released()),
        jax.tree_util.tree_leaves_with_path(expected),
        strict=True,
    ):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), path


@pytest.mark.slow
def test_stages_have_routers_of_their_own_experts():
    """V4.1's pick three of fewer experts than the trunk's layers have."""
    config = ds.DSV4Config.from_hf(v41.contents("tiny"))
    shapes = ds.unstack_layers(ds.model.param_shapes(config, jnp.bfloat16, weights="stored"))
    found = random_params(config, weights="stored", routing="zipf")
    assert jax.tree.map(jnp.shape, found.mtp) == jax.tree.map(jnp.shape, shapes.mtp)


@pytest.mark.slow
def test_dense_leaves_are_drawn_alike_beside_quantised_ones():
    dense = dict(walk_weights(random_params(serving.EVERY_TYPE)))
    found = {path: w for path, w in walk_weights(released()) if not is_quantized(w)}
    assert "layers.csa_learned.0.attn.compressor.wkv" in found
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, dense[path], err_msg=path)


SHAPES = {"whole tiles": (3, 256, 512), "filled up": (2, 192, 96)}


@pytest.mark.parametrize("weight_format", [BlockFP8, MXFP4])
@pytest.mark.parametrize(
    ("kind", "spread"),
    slow.all_but(
        [("whole tiles", 0.03), ("filled up", 1.0)],
        list(itertools.product(SHAPES, [512**-0.5, 0.03, 1.0])),
    ),
)
def test_values_are_finite_and_have_the_spread(weight_format, kind, spread):
    shape = SHAPES[kind]
    shapes = quantized_shape(weight_format, shape, jnp.bfloat16)
    weight = _random_weight(np.uint32(7), 0.0, spread, shapes)
    assert jax.tree.structure(weight) == jax.tree.structure(shapes)
    values = np.asarray(jax.jit(lambda w: w.decode())(weight), np.float64)
    assert values.shape == shape
    # Blocks of FP8 are few: the share of halved scales is a draw.
    scale = np.asarray(weight.scale).view(np.uint8)
    exponents = np.unique(scale[scale > 0])
    assert len(exponents) <= 2
    assert np.ptp(exponents) <= 1
    tolerance = 0.03 if weight_format is MXFP4 else 0.35
    assert values.std() == pytest.approx(spread, rel=tolerance)
    assert abs(values.mean()) < 0.03 * spread
    matrices = values.reshape(shape[0], -1)
    assert not np.array_equal(matrices[0], matrices[1])


@pytest.mark.slow
def test_a_sharp_mean_of_squares_over_many_blocks():
    shapes = quantized_shape(BlockFP8, (40, 1280, 1280), jnp.bfloat16)
    weight = _random_weight(np.uint32(7), 0.0, 0.02, shapes)
    codes = np.asarray(weight.codes[0, 0].astype(jnp.float32))
    assert np.abs(codes).max() > 400
    scale = 2.0 ** (np.asarray(weight.scale, np.float64) - 127)
    assert 256 * np.sqrt(np.mean(scale**2)) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("make", [_random_bytes, _random_scales])
def test_nothing_dense_is_made_on_the_way(make):
    seeds = [jnp.uint32(1)] * (1 if make is _random_bytes else 3)
    memory = make.lower(*seeds, shape=(8, 4, 4, 64, 64)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 8 * 4 * 4 * 64 * 64
    assert memory.temp_size_in_bytes < 4096
