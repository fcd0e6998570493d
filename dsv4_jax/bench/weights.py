"""Random parameters of any size, made on the device in their final dtype."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from dsv4_jax.bench.noise import random_array, random_bits
from dsv4_jax.bench.routing_laws import expert_table, router_bias
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.dspark import stage_config
from dsv4_jax.model.params import DSV4Params, leaf_spread, param_shapes, unstack_layers
from dsv4_jax.model.shardings import param_shardings
from dsv4_jax.model.weight_sizes import walk_weights
from pallas_kernels.common.weights import (
    INPUTS,
    MXFP4,
    MXFP4_GROUP,
    ROWS,
    BlockFP8,
    Weight,
    is_quantized,
)

_E4M3_SPREAD = 256.0
"""Of codes: uniform noise, so that the largest are 448."""
_E2M1_SPREAD = (137 / 16) ** 0.5
"""Of codes, all 16 alike: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of either sign."""


def random_params(
    config: DSV4Config,
    seed: int = 0,
    *,
    weights: str = "bfloat16",
    mesh: Mesh | None = None,
    routing: str = "uniform",
) -> DSV4Params:
    """Makes parameters with the statistics of `init_params`, layer by layer, without a host copy.

    Biases of routers are made for a law instead: random ones favour the same experts for all
    tokens, of which many then read no more than few do.

    Args:
      config: the model; its draft block is included.
      seed: seed of all draws.
      weights: as in `param_shapes`, beside activations in bf16 unless they are dense in another
        dtype; quantised ones are drawn as codes and scales, none is NaN.
      mesh: the devices that hold them; a weight is made on one device and then put there. None is
        one device.
      routing: the law by which tokens pick their experts, of `routing_laws.LAWS`.

    Returns:
      Parameters in the form of `unstack_layers`. Nothing else is allocated on the way.
    """
    shapes = unstack_layers(param_shapes(config, weights=weights))
    made: list[Any] = []
    structure = jax.tree.structure(shapes, is_leaf=is_quantized)
    shardings: list[Any] = [None] * structure.num_leaves
    if mesh is not None:
        shardings = structure.flatten_up_to(param_shardings(config, mesh, shapes))
    for number, (path, leaf) in enumerate(walk_weights(shapes)):
        name = path.rsplit(".", 1)[-1]
        leaf_seed = np.uint32(seed * 1_000_003 + number)
        weight = _routing_leaf(path, leaf_seed, leaf.shape, config, routing)
        if weight is None:
            weight = _random_weight(leaf_seed, *leaf_spread(name, leaf.shape), leaf)
        sharding = shardings[number]
        if sharding is not None:
            # One after the other, so that no more than one waits on the device that makes them.
            weight = jax.block_until_ready(jax.tree.map(_put, weight, sharding))
        made.append(weight)
    return jax.tree.unflatten(structure, made)


def with_routing(params: DSV4Params, config: DSV4Config, routing: str, seed: int = 0) -> DSV4Params:
    """Parameters of `random_params` of that seed, whose tokens pick by another law.

    All other arrays are shared.
    """
    made: list[Any] = []
    for number, (path, leaf) in enumerate(walk_weights(params)):
        leaf_seed = np.uint32(seed * 1_000_003 + number)
        weight = _routing_leaf(path, leaf_seed, leaf.shape, config, routing)
        if weight is not None and isinstance(where := getattr(leaf, "sharding", None), Sharding):
            weight = _put(weight, where)
        made.append(leaf if weight is None else weight)
    structure = jax.tree.structure(params, is_leaf=is_quantized)
    return jax.tree.unflatten(structure, made)


def _routing_leaf(
    path: str, seed: np.uint32, shape: tuple[int, ...], config: DSV4Config, routing: str
) -> jax.Array | None:
    """What decides which experts tokens pick; None if the leaf of that path does not."""
    name = path.rsplit(".", 1)[-1]
    if path.startswith("mtp.stages"):
        config = stage_config(config)
    if name == "tid2eid":
        return expert_table(shape, config, routing, int(seed))
    if name == "bias":
        return jnp.asarray(router_bias(config, routing, int(seed)))
    return None


def _put(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """Each process has all of the leaf, and keeps what its own devices hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    own = sharding.addressable_devices_indices_map(leaf.shape).items()
    parts = [jax.device_put(leaf[index], device) for device, index in own]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _random_weight(seed: np.uint32, mean: float, spread: float, shapes: Weight) -> Weight:
    """One weight of those shapes; quantised ones have mean 0."""
    scale_seed = seed ^ np.uint32(1 << 31)
    if isinstance(shapes, BlockFP8):
        exponents = _mixed_exponents(spread / _E4M3_SPREAD)
        codes = _dense(seed, 0.0, _E4M3_SPREAD, shapes.codes)
        scale = _random_scales(scale_seed, *exponents, shape=shapes.scale.shape)
        return dataclasses.replace(shapes, codes=codes, scale=scale)
    if isinstance(shapes, MXFP4):
        exponents = _mixed_exponents(spread / _E2M1_SPREAD)
        *lead, out, into = shapes.shape
        if out % ROWS or into % INPUTS:  # small models: tiles are filled up with zeros
            pairs = _random_bytes(seed, shape=(*lead, out, into // 2))
            shape = (*lead, out, -(-into // MXFP4_GROUP))
            scale = _random_scales(scale_seed, *exponents, shape=shape)
            group = shapes.row_group
            return MXFP4.from_stored(pairs, scale, dtype=shapes.dtype, row_group=group)
        codes = _random_bytes(seed, shape=shapes.codes.shape)
        groups = (*shapes.scale.shape, INPUTS // MXFP4_GROUP)
        scale = _random_scales(scale_seed, *exponents, shape=groups)
        scale = jax.lax.bitcast_convert_type(scale, jnp.int32)
        return dataclasses.replace(shapes, codes=codes, scale=scale)
    return _dense(seed, mean, spread, shapes)


def _dense(seed: np.uint32, mean: float, spread: float, leaf: jax.Array) -> jax.Array:
    return random_array(
        seed, np.float32(mean), np.float32(spread), shape=leaf.shape, dtype=leaf.dtype
    )


def _mixed_exponents(factor: float) -> tuple[np.uint32, np.uint32]:
    """UE8M0 of a power of two, and how many of 2**24 scales are half of it.

    The mean of their squares is that of the factor.
    """
    exponent = math.ceil(math.log2(factor))
    halved = (1 - (factor / 2.0**exponent) ** 2) * 4 / 3
    return np.uint32(exponent + 127), np.uint32(halved * 2**24)


@functools.partial(jax.jit, static_argnames="shape")
def _random_scales(
    seed: jax.Array, exponent: jax.Array, halved: jax.Array, *, shape: tuple[int, ...]
) -> jax.Array:
    """u8[shape]; exponents as of `_mixed_exponents`."""
    is_halved = (random_bits(shape, seed) >> 8) < halved
    return (exponent - is_halved.astype(jnp.uint32)).astype(jnp.uint8)


@functools.partial(jax.jit, static_argnames="shape")
def _random_bytes(seed: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return (random_bits(shape, seed) >> 24).astype(jnp.uint8)
