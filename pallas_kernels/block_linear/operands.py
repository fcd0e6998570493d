"""Rows as kernels take them: E4M3 in one part or two, in groups of 128 inputs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import numbers
from pallas_kernels.common.rows import GROUP, quantize_rows, split_rows
from pallas_kernels.common.weights import MXFP4, QuantizedWeight
from pallas_kernels.gpu import left_operand, mosaic


class Rows(NamedTuple):
    """Rows in E4M3, whose parts add up.

    Attributes:
      codes: e4m3[P, R, B * 128], one part if rows are rounded, two if they are as they were.
      scale: f32[P, B, R].
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def num_parts(self) -> int:
        """P."""
        return self.codes.shape[0]


def make_rows(x: jax.Array, weight: QuantizedWeight, num_spare: int) -> Rows:
    """Rows as this weight takes them, and some that are arbitrary behind them.

    Args:
      x: [R, in].
      weight: its `activations` say how many parts there are, its format how inputs are ordered.
      num_spare: rows that a kernel may read beyond the last.
    """
    num_rows = x.shape[0]
    x = jnp.pad(x, ((0, num_spare + -(num_rows + num_spare) % 8), (0, 0)))
    parts = [quantize_rows(x)] if weight.activations == "fp8" else split_rows(x)
    codes = jnp.stack([part.codes for part in parts])
    if isinstance(weight, MXFP4):
        codes = left_operand.order_columns(codes, mosaic.WIDE_ROWS)
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    scale = numbers.decode_ue8m0(jnp.stack([part.scale for part in parts]))
    num_groups = codes.shape[-2]
    return Rows(codes.reshape(*codes.shape[:2], num_groups * GROUP), scale.swapaxes(1, 2))
