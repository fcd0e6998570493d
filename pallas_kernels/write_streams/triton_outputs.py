"""A sublayer's output as a Triton kernel of `write_streams` reads it: whole, or in parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.pending import Output, PickedSums, SplitSums
from pallas_kernels.gpu import triton

Ref = Any


def operand_of(output: Output) -> jax.Array | PickedSums:
    """What a launch takes of an output: [S, T, D], S parts, or `PickedSums`."""
    if isinstance(output, SplitSums):
        return output.parts
    return output if isinstance(output, PickedSums) else output[None]


def load_output(
    output: Ref | PickedSums,
    token: jax.Array,
    column: jax.Array,
    live: jax.Array,
    *,
    is_sum: bool,
    dtype: Any,
) -> jax.Array:
    """Columns of a token's output, f32; of a sum rounded once, as it would have been stored.

    Args:
      output: refs of `operand_of`.
      token: i32[].
      column: i32[N].
      live: bool[N], the column exists; zeros elsewhere.
      is_sum: whether the output came in parts.
      dtype: of the output.
    """
    if isinstance(output, PickedSums):
        y = _add_picked(output, token, column, live)
    else:
        y = jnp.zeros(column.shape, jnp.float32)
        # In the order of the parts, in f32.
        for part in range(output.shape[0]):
            values = triton.load_where(output, (jnp.int32(part), token, column), live)
            y = y + values.astype(jnp.float32)
    return triton.round_to_bf16(y) if is_sum and dtype == jnp.bfloat16 else y


def _add_picked(
    output: PickedSums, token: jax.Array, column: jax.Array, live: jax.Array
) -> jax.Array:
    """The columns of a token's sum in f32, in the order of its picks; `output` is of refs."""
    y = jnp.zeros(column.shape, jnp.float32)
    for pick in range(output.row.shape[1]):
        picked, row = (ref[token, jnp.int32(pick)] for ref in (output.picked, output.row))
        is_there = (picked >= 0) & (picked < output.num_picked)
        # The row of nothing is arbitrary: it is replaced before it is an address.
        address = jnp.where(is_there, row, 0), column
        y = y + triton.load_where(output.rows, address, live & is_there)
    return y + triton.load_where(output.rows, (output.first_own + token, column), live)
