"""Products with a weight matrix, which every sublayer computes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from pallas_kernels import block_linear, block_linears
from pallas_kernels.block_linear import block_linear_in_parts
from pallas_kernels.common.split_sums import SplitSums
from pallas_kernels.common.weights import Weight


def linear(x: jax.Array, weight: Weight, *, dtype: DTypeLike | None = None) -> jax.Array:
    """[..., in] times [out, in] -> [..., out], accumulated in f32.

    Args:
      x: [..., in].
      weight: [out, in], dense or quantised.
      dtype: of the result; None is that of x.
    """
    product = block_linear(x.reshape(-1, x.shape[-1]), weight, dtype=dtype)
    return product.reshape(*x.shape[:-1], product.shape[-1])


def linears(
    x: jax.Array,
    weights: Sequence[Weight],
    *,
    norms: Sequence[jax.Array | None] | None = None,
    eps: float = 0.0,
) -> list[jax.Array]:
    """`linear` of the same rows with several weights, in one launch where they are quantised.

    Args:
      x: [..., in].
      weights: [out, in] each.
      norms: [out] for each, weight of the RMS norm that follows, or None for none.
      eps: floor of the norms.
    """
    products = block_linears(x.reshape(-1, x.shape[-1]), weights, norms=norms, eps=eps)
    return [product.reshape(*x.shape[:-1], product.shape[-1]) for product in products]


def grouped_linear(
    x: jax.Array, weight: Weight, *, dtype: DTypeLike | None = None
) -> jax.Array | SplitSums:
    """As `linear`, group by group in one product: [..., G, in], [G, out, in] -> [..., G, out].

    The product of one row may be left in parts, for the product that follows.
    """
    rows = x.reshape(-1, *x.shape[-2:])
    if rows.shape[0] == 1 and dtype is None:
        product = block_linear_in_parts(rows.reshape(-1, 1, x.shape[-1]), weight)
    else:
        product = block_linear(rows.swapaxes(0, 1), weight, dtype=dtype).swapaxes(0, 1)
    return product.reshape(*x.shape[:-1], product.shape[-1])


def linear_in_parts(x: jax.Array | SplitSums, weight: Weight) -> jax.Array | SplitSums:
    """`linear`, whose result may be left in parts for what reads it."""
    product = block_linear_in_parts(x.reshape(-1, x.shape[-1]), weight)
    return product.reshape(*x.shape[:-1], product.shape[-1])
