"""The product of rows with a quantised weight, as items of the kernel for Hopper."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import call_shapes
from pallas_kernels.block_linear.call_shapes import Tiling
from pallas_kernels.block_linear.mosaic_hopper import Items, multiply_items
from pallas_kernels.block_linear.triton_rows import make_rows
from pallas_kernels.common.weights import QuantizedWeight


def block_linear(
    x: jax.Array, weight: QuantizedWeight, *, tiling: Tiling | None = None
) -> jax.Array:
    """[G, T, in] times [G, out, in] -> f32[G, T, out]; see `op.block_linear`."""
    num_groups, num_tokens, dim = x.shape
    shapes = call_shapes.shapes_of(weight)
    tiling = tiling or call_shapes.choose_tiling(shapes, num_tokens, num_groups, may_split=True)
    rows_of_group = -(-num_tokens // 8) * 8  # bulk copies take eight rows together
    tiles = -(-num_tokens // tiling.columns)
    number = jnp.arange(num_groups * tiles, dtype=jnp.int32)
    inside = number % tiles * tiling.columns
    items = Items(
        weight=number // tiles,
        first=number // tiles * rows_of_group + inside,
        num_rows=jnp.minimum(num_tokens - inside, tiling.columns),
    )
    spare = call_shapes.scale_columns(tiling.columns)
    x = jnp.pad(x, ((0, 0), (0, rows_of_group - num_tokens), (0, 0)))
    rows = make_rows(x.reshape(-1, dim), weight, num_spare=spare)
    sums = multiply_items(rows, [weight], items, shapes=shapes, tiling=tiling)
    sums = jnp.sum(sums, axis=0)[: num_groups * rows_of_group]
    return sums.reshape(num_groups, rows_of_group, -1)[:, :num_tokens]
