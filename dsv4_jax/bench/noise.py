"""Random arrays without temporaries: each element is a hash of its index."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)


def random_bits(shape: Sequence[int], seed: jax.Array) -> jax.Array:
    """u32[shape], a hash of each index and the seed; XLA fuses it into its consumer.

    Args:
      shape: at most five axes of any size.
      seed: u32[].
    """
    bits = jnp.full(shape, seed * np.uint32(_ODD[4]), jnp.uint32)
    for axis in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        bits = _mix(bits ^ (index * np.uint32(_ODD[axis])))
    return _mix(bits)


def uniform(shape: Sequence[int], seed: jax.Array) -> jax.Array:
    """f32[shape], uniform, with mean 0 and variance 1."""
    signed = jax.lax.bitcast_convert_type(random_bits(shape, seed), jnp.int32)
    return signed.astype(jnp.float32) * np.float32(3**0.5 * 2.0**-31)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_array(
    seed: jax.Array, mean: jax.Array, spread: jax.Array, *, shape: tuple[int, ...], dtype: DTypeLike
) -> jax.Array:
    """dtype[shape] with this mean and standard deviation; one kernel, compiled once per shape."""
    return (mean + spread * uniform(shape, seed)).astype(dtype)


def _mix(bits: jax.Array) -> jax.Array:
    """Mixes bits: every bit of the result depends on every bit of the argument."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
