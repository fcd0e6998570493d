"""Definition of the product of rows with a weight.

Source: deepseek_v4.md section 4.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import compute_capability
from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.pending import ByToken, Pending, finish
from pallas_kernels.common.rounding import round_to
from pallas_kernels.common.rows import round_rows
from pallas_kernels.common.swiglu import swiglu
from pallas_kernels.common.weights import (
    MXFP4,
    BlockFP8,
    Weight,
    decode_weight,
    is_quantized,
    takes_rounded_rows,
)


def block_linear(x: jax.Array, weight: Weight) -> jax.Array:
    """[G, T, in] times [G, out, in] -> f32[G, T, out].

    A quantised weight is decoded, and takes x rounded if it is so marked; the product is f32's.

    On a CPU a product of one row is computed as one of two: the two round differently, and a
    request alone must equal the same request in a batch.
    """
    alone = x.shape[1] == 1 and compute_capability() is None
    x = jnp.concatenate([x, x], axis=1) if alone else x  # [G, T or 2, in]
    if is_quantized(weight):
        x = as_operand(x, weight).astype(jnp.float32)
    matrix = decode_weight(weight)  # f32 or its own dtype, [G, out, in]
    if x.shape[0] == 1:
        product = _product(x[0], matrix[0], (((1,), (1,)), ((), ())))[None]  # over `in`
    else:
        product = _product(x, matrix, (((2,), (2,)), ((0,), (0,))))  # f32[G, T, out]
    return product[:, :1] if alone else product


def block_linears(
    x: jax.Array | Pending,
    weights: Sequence[Weight],
    *,
    norms: Sequence[jax.Array | None] = (),
    eps: float = 0.0,
    dtype: DTypeLike,
    in_parts: bool = False,
) -> list[jax.Array]:
    """`block_linear` with each weight, rounded once, then normed where there is a norm.

    x is [T, in], or [G, T, in] for G weights each.
    """
    del in_parts
    grouped = x.ndim == 3
    if not grouped:
        assert not isinstance(x, ByToken), "which is of groups"
        x, weights = x.reshape(1, *x.shape), list(map(_stack, weights))  # [1, T, in], [1, out, in]
    x = finish(x)
    products = [round_to(block_linear(x, weight), dtype) for weight in weights]  # [G, T, out]
    products = [
        product if norm is None else rms_norm(product, norm, eps=eps)
        for product, norm in itertools.zip_longest(products, norms)
    ]
    return products if grouped else [product.reshape(*product.shape[1:]) for product in products]


def swiglu_linear(x: jax.Array, gate: Weight, up: Weight, *, limit: float) -> jax.Array:
    """See `op.swiglu_linear`."""
    gated, raised = block_linears(x, [gate, up], dtype=x.dtype)  # [T, out] each
    return round_to(swiglu(gated, raised, limit), x.dtype)


def as_operand(x: jax.Array, weight: Weight) -> jax.Array:
    """The rows as this weight takes them: rounded to E4M3, or left alone."""
    if not isinstance(weight, BlockFP8 | MXFP4) or not takes_rounded_rows(weight):
        return x
    return round_rows(x, weight.row_group)


def _product(x: jax.Array, weight: jax.Array, dimensions: Any) -> jax.Array:
    return jax.lax.dot_general(
        x,
        weight,
        dimensions,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _stack(weight: Weight) -> Weight:
    """[out, in] -> [1, out, in]."""
    return jax.tree.map(lambda leaf: leaf[None], weight)
