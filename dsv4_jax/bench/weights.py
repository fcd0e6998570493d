"""Random parameters of any size, made on the device in their final dtype."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.noise import random_array, random_bits
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params, leaf_spread, param_shapes, unstack_layers


def random_params(config: DSV4Config, seed: int = 0, dtype: Any = jnp.bfloat16) -> DSV4Params:
    """Makes parameters with the statistics of `init_params`, layer by layer, without a host copy.

    Args:
      config: the model; its draft block is included.
      seed: seed of all draws.
      dtype: as in `param_shapes`.

    Returns:
      Parameters in the form of `unstack_layers`. Nothing else is allocated on the way.
    """
    shapes = unstack_layers(param_shapes(config, dtype))
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    made = []
    for number, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        leaf_seed = np.uint32(seed * 1_000_003 + number)
        if name == "tid2eid":
            made.append(_expert_table(leaf_seed, leaf.shape, config.num_routed_experts))
            continue
        mean, spread = leaf_spread(name, leaf.shape)
        made.append(
            random_array(
                leaf_seed,
                np.float32(mean),
                np.float32(spread),
                shape=leaf.shape,
                dtype=leaf.dtype,
            )
        )
    return jax.tree.unflatten(treedef, made)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _expert_table(seed: jax.Array, shape: tuple[int, ...], num_experts: int) -> jax.Array:
    """i32[V, k]: consecutive experts (modulo their number), so that a token's are distinct."""
    first = random_bits((*shape[:-1], 1), seed) >> 8
    place = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return ((first + place) % num_experts).astype(jnp.int32)
