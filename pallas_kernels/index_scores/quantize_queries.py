"""Index queries into E4M3 under one scale per head, by a warpgroup of the kernel that wants them.

Queries come rounded as keys are, so that they are exact in E4M3 where a head's group scales lie
within a factor of 2^14. A head's scale, a power of two, goes into its weight.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.gpu import e4m3, mosaic

Ref = Any
plgpu: Any = mosaic_gpu
ROWS = 16
"""Heads that a warpgroup loads and quantises at a time, each warp four, a whole row at once."""
_LAYOUT = mosaic.LINES
BY_ROW = _LAYOUT.reduce(1)
_ROOM = 0x1FFFFF
"""Carries into the exponent what has a mantissa above that of 448 = 1.75 * 2^8, E4M3's largest."""


def load_heads(queries: Ref, weights: Ref) -> tuple[jax.Array, jax.Array]:
    """Rows of shared memory into registers.

    Args:
      queries: bf16[16, IC].
      weights: f32[16].

    Returns:
      f32[16, IC] in `mosaic.LINES` layout and f32[16] in `BY_ROW` layout.
    """
    values = plgpu.load(queries, layout=_LAYOUT, optimized=False)
    return values.astype(jnp.float32), plgpu.load(weights, layout=BY_ROW, optimized=False)


def quantize(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What was loaded as codes, and weights times scales.

    Returns:
      e4m3[16, IC] in `mosaic.LINES` layout and f32[16] in `BY_ROW` layout.
    """
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(values), axis=1), jnp.int32)
    # The least power of two at which no code exceeds 448, from the bits of the largest magnitude.
    scale = jnp.maximum(((largest + _ROOM) >> 23) - 8, 1)  # UE8M0
    inverse = lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    inverse = plgpu.layout_cast(lax.broadcast_in_dim(inverse, values.shape, [0]), _LAYOUT)
    codes = e4m3.encode(values * inverse)
    return codes, weights * lax.bitcast_convert_type(scale << 23, jnp.float32)
