"""Products with a weight matrix, which every sublayer computes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_kernels import block_linear, block_linears, joined_linears
from pallas_kernels.block_linear import block_linear_by_token, block_linear_in_parts
from pallas_kernels.common.pending import ByGroup, MaybeSplit, Unnormed
from pallas_kernels.common.weights import Weight
from pallas_kernels.joined_linears import joins


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
    x: jax.Array | Unnormed,
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


def linears_beside_dense(
    x: jax.Array,
    weights: Sequence[Weight],
    dense: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    positions: jax.Array,
    *,
    norms: Sequence[jax.Array | None],
    eps: float,
) -> tuple[Sequence[jax.Array | Unnormed], list[jax.Array]]:
    """`linears` with some weights, and f32 products of the same rows with dense ones.

    Args:
      x: [T, in].
      weights: see `linears`.
      dense: [out, in] each.
      biases: f32[M, out] for each of `dense`, of which row `position % M` is added, or None.
      positions: i32[T].
      norms: see `linears`.
      eps: see `linears`.

    Returns:
      Results of `weights`, whose norms may be left to who reads them, and f32[T, out] of `dense`.
      All are one launch where rows are few.
    """
    if not joins(x, weights):
        others = joined_linears(x, dense, biases, positions) if dense else []
        return linears(x, weights, norms=norms, eps=eps), others
    products = joined_linears(
        x,
        [*weights, *dense],
        [*[None] * len(weights), *biases],
        positions,
        dtypes=[*[x.dtype] * len(weights), *[jnp.float32] * len(dense)],
    )
    first = [
        product if norm is None else Unnormed(product, norm, eps)
        for product, norm in zip(products, norms, strict=False)
    ]
    return first, products[len(weights) :]


def grouped_linear(
    x: jax.Array, weight: Weight, *, dtype: DTypeLike | None = None
) -> jax.Array | ByGroup:
    """As `linear`, group by group in one product: [..., G, in], [G, out, in] -> [..., G * out].

    It may be left by groups and in parts, for the product that follows.
    """
    product = block_linear_by_token(x.reshape(-1, *x.shape[-2:]), weight, dtype=dtype)
    return product.reshape(*x.shape[:-2], product.shape[-1])


def linear_in_parts(x: jax.Array | ByGroup, weight: Weight) -> MaybeSplit:
    """`linear`, whose result may be left in parts for what reads it."""
    product = block_linear_in_parts(x.reshape(-1, x.shape[-1]), weight)
    return product.reshape(*x.shape[:-1], product.shape[-1])


def name_product[Result: MaybeSplit | ByGroup | None](x: Result, name: str) -> Result:
    """`checkpoint_name` of a product; one in parts, or None, is no array and gets no name."""
    if isinstance(x, jax.Array):
        return checkpoint_name(x, name)
    return x
