"""The two rotary tables: main for SWA layers, compress for everything in CSA and HCA layers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.config import DSV4Config, YarnScaling
from dsv4_jax.config.layer_types import AttentionType


def rope_frequencies(config: DSV4Config, attn: AttentionType) -> jax.Array:
    """Radians per position of each pair of dims.

    Built in NumPy, step by step in f32 as the released code does (the power itself is correctly
    rounded): that gives its bits, which jnp does not.

    Args:
      config: the model.
      attn: type of the layer; SWA takes the main table, the others the compress table.

    Returns:
      f32[R / 2].

    Source: deepseek_v4.md section 1.4 and appendix A.
    """
    if attn == AttentionType.SWA:
        return jnp.asarray(_plain(config.rope_theta, config.rope_dim))
    plain = _plain(config.compress_rope_theta, config.rope_dim)
    if config.rope_scaling is None:
        return jnp.asarray(plain)
    ramp = _yarn_ramp(config.compress_rope_theta, config.rope_dim, config.rope_scaling)
    stretched = plain / np.float32(config.rope_scaling.factor)
    return jnp.asarray(stretched * ramp + plain * (1 - ramp))


def _plain(theta: float, rope_dim: int) -> np.ndarray:
    exponent = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    return np.float32(1) / np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)


def _yarn_ramp(theta: float, rope_dim: int, scaling: YarnScaling) -> np.ndarray:
    """f32[R / 2]: 0 where a frequency is kept, 1 where it is divided by the factor."""

    def dim_of(rotations: float) -> float:
        periods = scaling.original_max_positions / (rotations * 2 * math.pi)
        return rope_dim * math.log(periods) / (2 * math.log(theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), rope_dim - 1)
    span = np.float32(high - low) if high != low else np.float32(0.001)
    index = np.arange(rope_dim // 2, dtype=np.float32)
    return np.clip((index - np.float32(low)) / span, 0, 1).astype(np.float32)
