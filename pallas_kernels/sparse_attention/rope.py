"""RoPE of what lies in shared memory, for both kinds of GPU.

    (a, b) -> (a cos - b sin, b cos + a sin)        = values * cos + neighbours * (-sin, sin)

Sines and cosines are XLA's, as those of `norm_rope.rotate` are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.sparse_attention.call_shapes import GROUP, Shapes

Ref = Any
plgpu: Any = mosaic_gpu


def rotated_columns(frequencies: jax.Array) -> int:
    """The last columns among which the R dims are, in whole groups."""
    return pl.cdiv(2 * frequencies.shape[0], GROUP) * GROUP


def angles_of(positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """f32[T, 2, N]: what the last N columns of a token's vectors are multiplied by, and neighbours.

    Columns before the R dims have 1 and 0.
    """
    angle = positions.astype(jnp.float32)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    signed = jnp.stack([-sin, sin], axis=-1)
    both = jnp.stack([jnp.repeat(cos, 2, axis=-1), signed.reshape(len(signed), -1)], axis=1)
    spare = rotated_columns(frequencies) - both.shape[-1]
    before = jnp.broadcast_to(jnp.float32([[1], [0]]), (len(both), 2, spare))
    return jnp.concatenate([before, both], axis=-1)


def rotate(values: jax.Array, angles: Ref, *, inverse: bool = False) -> jax.Array:
    """f32[M, 64] in `mosaic.ROWS` layout, rotated by f32[2, 64]."""
    # A factor for each column, loaded by column and then spread over the rows in the layout of the
    # values.
    cos, sin = (
        plgpu.layout_cast(
            lax.broadcast_in_dim(
                plgpu.load(angles.at[i], layout=mosaic.ROWS.reduce(0), optimized=False),
                values.shape,
                [1],
            ),
            mosaic.ROWS,
        )
        for i in range(2)
    )
    crossed = mosaic.swap_neighbours(values, mosaic.ROWS) * sin
    return values * cos - crossed if inverse else values * cos + crossed


def rotate_half(
    half: Ref,
    number: int,
    angles: Ref,
    *,
    shapes: Shapes,
    store_shared: Callable[[Ref, jax.Array, Any], None],
) -> None:
    """Inverse RoPE of what one warpgroup has of the output, the bits of bf16, where it lies.

    Args:
      half: [64, C / 2] in shared memory, in the dtype of products.
      number: 0 or 1, of the half.
      angles: f32[2, rotated], the token's.
      shapes: sizes of the call.
      store_shared: stores to shared memory; see `gather_keys.gather_keys`.
    """
    for column in range(0, shapes.rotated, GROUP):
        owner, first = divmod(shapes.dim - shapes.rotated + column, shapes.dim // 2)
        # Rotated columns lie at the end of a row, in whole groups, each of which is in one half.
        if owner == number:
            chunk = half.at[:, pl.ds(first, GROUP)]
            _rotate_chunk(chunk, angles.at[:, pl.ds(column, GROUP)], shapes.dtype, store_shared)


def _rotate_chunk(chunk: Ref, angles: Ref, dtype: Any, store_shared: Callable[..., None]) -> None:
    # Loaded and stored by the same thread in the same layout, so that no barrier stands in between.
    bits = plgpu.load(chunk, layout=mosaic.ROWS, optimized=False)
    values = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
    rotated = rotate(values, angles, inverse=True).astype(jnp.bfloat16)
    if dtype != jnp.bfloat16:
        rotated = lax.bitcast_convert_type(rotated, dtype)
    store_shared(chunk, rotated, mosaic.ROWS)
