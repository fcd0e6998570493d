"""RMS norm and RoPE (rotary embedding), the elementwise maths that several ops share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.rounding import round_to, rounded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormRope:
    """The norm of a layer's vectors, and their RoPE.

    Attributes:
      weight: [C], weight of the norm of window entries.
      frequencies: f32[R / 2], radians per position; the last R dims rotate.
      eps: floor of the layer's norms; static.
      norms_queries: whether each query head is normed, without a weight, before it rotates; static.
    """

    weight: jax.Array
    frequencies: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})
    norms_queries: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def query_eps(self) -> float | None:
        """Floor of the queries' norm; None where they have none."""
        return self.eps if self.norms_queries else None


def rms_norm(x: jax.Array, weight: jax.Array | None, *, eps: float) -> jax.Array:
    """RMS norm of the last axis: x / sqrt(mean(x**2) + eps) * weight, in f32, in the dtype of x."""
    wide = x.astype(jnp.float32)  # [..., C]
    return _scale(x, weight, jnp.mean(wide * wide, axis=-1, keepdims=True), eps)


def rms_norm_by_pairs(x: jax.Array, weight: jax.Array | None, *, eps: float) -> jax.Array:
    """As `rms_norm`, but a row's bits depend on the row alone, whatever lies beside it.

    XLA sums rows of small and of large arrays in different orders; here neighbours are added.
    """
    squares = jnp.square(x.astype(jnp.float32))  # [..., C]
    width = pl.next_power_of_2(x.shape[-1])
    # Zeros up to a power of two, so that each number has a neighbour; they add nothing.
    squares = jnp.pad(squares, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    return _scale(x, weight, rounded(sum_by_pairs(squares) / x.shape[-1]), eps)


def sum_by_pairs(x: jax.Array) -> jax.Array:
    """f32[..., n] -> f32[..., 1], n a power of two, adding neighbours, then neighbouring sums."""
    while x.shape[-1] > 1:
        x = rounded(x[..., 0::2]) + rounded(x[..., 1::2])
    return x


def _scale(x: jax.Array, weight: jax.Array | None, mean_square: jax.Array, eps: float) -> jax.Array:
    scaled = x.astype(jnp.float32) * jax.lax.rsqrt(mean_square + eps)
    if weight is not None:
        scaled = scaled * jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return round_to(scaled, x.dtype)


def rotate(
    x: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    *,
    inverse: bool = False,
) -> jax.Array:
    """RoPE of the last R dims; dims 2i and 2i + 1 are a pair.

    Args:
      x: [..., C], any leading axes that `positions` broadcasts to.
      positions: i32[...], position of each vector.
      frequencies: f32[R / 2], radians per position.
      inverse: rotates by minus the angle, which undoes it.

    Returns:
      [..., C] in the dtype of x: (a, b) -> (a cos - b sin, b cos + a sin), computed in f32 from
      one f32 product position * frequency, as the released code does.

    Source: deepseek_v4.md section 1.4.
    """
    rope_dim = 2 * frequencies.shape[-1]
    nope_dim = x.shape[-1] - rope_dim
    positions = jnp.expand_dims(positions, range(x.ndim - 1 - positions.ndim))
    frequencies = jnp.expand_dims(frequencies, range(x.ndim - 1))
    angle = positions.astype(jnp.float32)[..., None] * frequencies  # f32[..., R / 2], radians
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if inverse:
        sin = -sin
    pairs = x[..., nope_dim:].astype(jnp.float32).reshape(*x.shape[:-1], rope_dim // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]  # f32[..., R / 2]
    # Each product is rounded by itself: no compiler may fuse it into the sum.
    rotated = jnp.stack(
        [rounded(a * cos) - rounded(b * sin), rounded(b * cos) + rounded(a * sin)], axis=-1
    )
    rotated = round_to(rotated.reshape(*x.shape[:-1], rope_dim), x.dtype)
    return jnp.concatenate([x[..., :nope_dim], rotated], axis=-1)
