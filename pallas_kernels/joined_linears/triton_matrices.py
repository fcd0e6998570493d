"""Some outputs of a dense weight for up to 64 rows at once, on tensor cores, in a Triton kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton

Ref = Any
MAX_ROWS = 64
NUM_STAGES = 4
_INPUTS = 128
_SIDE = 16
"""Rows and outputs that a product of matrices has at least."""


def outputs_of_program(num_rows: int) -> int:
    """Outputs that a program multiplies; with more rows, more, as each program reads all rows."""
    return min(_rows_width(num_rows), 2 * _SIDE)


def num_warps(num_rows: int) -> int:
    """Of a program: two for each 16 of its outputs."""
    return outputs_of_program(num_rows) // _SIDE * 2


def multiply(
    x: Ref, weight: Ref, bias: Ref | None, positions: Ref, result: Ref, out: jax.Array
) -> None:
    """Stores these outputs of all rows.

    Args:
      x: bf16[T, in].
      weight: bf16[out, in].
      bias: f32[M, out] or None.
      positions: i32[T].
      result: [T, out].
      out: i32[n], the outputs; those beyond the last are none.
    """
    num_rows, dim = x.shape
    # Rows beyond the last are zeros, for the 16 that a product of matrices has at least, and not
    # stored.
    row = jnp.arange(_rows_width(num_rows), dtype=jnp.int32)
    exists, is_row = out < weight.shape[0], row < num_rows

    def add_run(run: jax.Array, total: jax.Array) -> jax.Array:
        column = run * _INPUTS + jnp.arange(_INPUTS, dtype=jnp.int32)
        inside = (column < dim)[None]
        # The last run may reach beyond the inputs: both operands are zeros there, and add nothing.
        tile = triton.load_where(weight, (out[:, None], column[None]), exists[:, None] & inside)
        values = triton.load_where(x, (row[:, None], column[None]), is_row[:, None] & inside)
        over_inputs = ((1,), (1,)), ((), ())
        return total + jax.lax.dot_general(
            values, tile, over_inputs, preferred_element_type=jnp.float32
        )

    zeros = jnp.zeros((row.shape[0], out.shape[0]), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(dim, _INPUTS), add_run, zeros)  # f32[rows, n]
    here = is_row[:, None] & exists[None]
    if bias is not None:
        # Positions repeat with the bias; rows that are not there read row 0 of it.
        bias_row = triton.load_where(positions, (row,), is_row) % bias.shape[0]
        total = total + triton.load_where(bias, (bias_row[:, None], out[None]), here)
    triton.store_where(result, (row[:, None], out[None]), total.astype(result.dtype), here)


def _rows_width(num_rows: int) -> int:
    return max(_SIDE, pl.next_power_of_2(num_rows))
