"""Products with a weight matrix, which every sublayer computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import compute_capability


def linear(x: jax.Array, weight: jax.Array, *, dtype: DTypeLike | None = None) -> jax.Array:
    """[..., in] times [out, in] -> [..., out], accumulated in f32.

    On a CPU a product of one row is computed as one of two: the two round differently, and a
    request alone must equal the same request in a batch.

    Args:
      x: [..., in].
      weight: [out, in].
      dtype: of the result; None is that of x.
    """
    grouped = grouped_linear(x[..., None, :], weight[None], dtype=dtype)
    return grouped[..., 0, :]


def grouped_linear(x: jax.Array, weight: jax.Array, *, dtype: DTypeLike | None = None) -> jax.Array:
    """As `linear`, group by group in one product: [..., G, in], [G, out, in] -> [..., G, out]."""
    groups, out, _ = weight.shape
    rows = x.reshape(-1, *x.shape[-2:])
    alone = rows.shape[0] == 1 and compute_capability() is None
    rows = jnp.concatenate([rows, rows]) if alone else rows
    if groups == 1:
        product = _product(rows[:, 0], weight[0], (((1,), (1,)), ((), ())))[:, None]
    else:
        product = _product(rows, weight, (((2,), (2,)), ((1,), (0,)))).swapaxes(0, 1)
    product = product[:1] if alone else product
    return product.reshape(*x.shape[:-1], out).astype(dtype or x.dtype)


def _product(x: jax.Array, weight: jax.Array, dimensions: Any) -> jax.Array:
    return jax.lax.dot_general(
        x,
        weight,
        dimensions,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
