"""Activations as quantised weights take them: rows of E4M3 with a scale for 128 inputs, or 32.

Source: deepseek_v4.md section 4.5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import numbers

GROUP = 128
"""Inputs of a row that share a scale, where a weight does not say otherwise."""
_AMAX_FLOOR = np.float32(1e-4)
_LARGEST = np.finfo(np.float32).max
REST_BITS = 4
REST = 2.0**REST_BITS
"""What E4M3 leaves of a value is at most 16 where the value is at most 448.

So bf16 rows that are not to be rounded are two rows of E4M3: what it keeps of them, and what that
lacks times `REST`, under a scale so much smaller. E4M3 has 4 bits of a significand and bf16 8: the
sum is exact where a value is at least 2^-14 of the largest in its group; below that it is off by at
most 2^-22 of the largest.
"""


class QuantizedRows(NamedTuple):
    """Rows in E4M3.

    Attributes:
      codes: u8[..., ceil(in / g), g]; a short last group is filled up with zeros.
      scale: u8[..., ceil(in / g)], UE8M0.
    """

    codes: jax.Array
    scale: jax.Array


def quantize_rows(x: jax.Array, group: int = GROUP) -> QuantizedRows:
    """[..., in] to E4M3: the least power of two at which no code exceeds 448, floored.

    `group` inputs of a row share a scale.

    NaN makes a NaN code and does not reach the scale; infinities make the scale's largest finite
    value and codes of 448.
    """
    groups = numbers.split_groups(x.astype(jnp.float32), group)
    scale = numbers.encode_ue8m0(group_maximum(groups) * numbers.INV_448)
    return QuantizedRows(
        numbers.encode_e4m3(groups * numbers.invert_ue8m0(scale)[..., None]), scale
    )


def group_maximum(groups: jax.Array) -> jax.Array:
    """f32[..., g] -> f32[...], the largest magnitude that counts for the scale."""
    magnitude = jnp.where(groups == groups, jnp.abs(groups), 0.0)
    largest = jnp.max(magnitude, axis=-1)
    return jnp.minimum(jnp.maximum(largest, _AMAX_FLOOR), _LARGEST)


def round_rows(x: jax.Array, group: int = GROUP) -> jax.Array:
    """[..., in] -> the same dtype: what E4M3 keeps of it, exact in bf16 and f32."""
    return decode_rows(quantize_rows(x, group), x.shape[-1]).astype(x.dtype)


def decode_rows(rows: QuantizedRows, size: int) -> jax.Array:
    """Their values, f32[..., size], which bf16 holds as well.

    Rounded again they are the same values: their scale may be half of what it was, where all codes
    have twice their value.
    """
    values = numbers.decode_e4m3(rows.codes) * numbers.decode_ue8m0(rows.scale)[..., None]
    return numbers.join_groups(values, size)
