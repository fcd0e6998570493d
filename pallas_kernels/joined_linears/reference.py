"""Definition of `joined_linears`: x W^T + b[position % M], in f32, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.block_linear.reference import block_linear
from pallas_kernels.common.weights import Weight


class Arguments(NamedTuple):
    """The checked arguments of `op.joined_linears`.

    Attributes:
      x: [T, in].
      weights: [out, in] each.
      biases: f32[M, out] for each weight, or None.
      positions: i32[T].
      dtypes: of each result.
    """

    x: jax.Array
    weights: Sequence[Weight]
    biases: Sequence[jax.Array | None]
    positions: jax.Array
    dtypes: Sequence[DTypeLike]


def joined_linears(arguments: Arguments) -> list[jax.Array]:
    """See `op.joined_linears`."""
    products = []
    for weight, bias, dtype in zip(
        arguments.weights, arguments.biases, arguments.dtypes, strict=True
    ):
        stack = jax.tree.map(lambda leaf: leaf[None], weight)  # [1, out, in]
        product = block_linear(arguments.x[None], stack)[0].astype(jnp.float32)  # f32[T, out]
        if bias is not None:
            product = product + bias[arguments.positions % bias.shape[0]]  # f32[T, out]
        products.append(product.astype(dtype))  # rounded once, bias and all
    return products
