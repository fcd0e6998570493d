"""Many rows, as they are, times block FP8: XLA multiplies what the codes stand for.

The kernel takes such rows in two terms of E4M3, twice the products. From some rows on decoding the
weights takes less time than those: bf16 holds each value of a code with a scale of a power of two.
Measurements: docs/kernels/block_linear.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.pending import Pending
from pallas_kernels.common.weights import BlockFP8, Weight

MANY_ROWS = 1024


def suits(weights: Sequence[Weight], x: jax.Array | Pending) -> TypeGuard[Sequence[BlockFP8]]:
    """Whether rows [G, T, in] are multiplied with these weights so."""
    is_plain = isinstance(x, jax.Array) and x.dtype == jnp.bfloat16
    return is_plain and x.shape[1] >= MANY_ROWS and all(map(_is_exact, weights))


def multiply(x: jax.Array | Pending, weight: BlockFP8, *, dtype: DTypeLike) -> jax.Array:
    """bf16[G, T, in] times [G, out, in] -> [G, T, out], accumulated in f32."""
    assert isinstance(x, jax.Array)
    matrix = weight.decode().astype(jnp.bfloat16)  # exact: E4M3 times a power of two
    over_inputs = ((2,), (2,)), ((0,), (0,))
    return jax.lax.dot_general(x, matrix, over_inputs, preferred_element_type=dtype)


def _is_exact(weight: Weight) -> bool:
    """Whether it takes rows as they are, and scales are powers of two."""
    if not isinstance(weight, BlockFP8) or weight.activations == "fp8":
        return False
    return weight.scale.dtype == jnp.uint8
