"""Definition of `joined_linears`: x W^T + b[position % M], in f32, rounded once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import reference
from pallas_kernels.joined_linears.arguments import Arguments


def joined_linears(arguments: Arguments) -> list[jax.Array]:
    """See `op.joined_linears`."""
    x, weights, biases, positions, dtypes = arguments
    products = []
    for weight, bias, dtype in zip(weights, biases, dtypes, strict=True):
        stack = jax.tree.map(lambda leaf: leaf[None], weight)
        product = reference.block_linear(x[None], stack)[0].astype(jnp.float32)
        product = product if bias is None else product + bias[positions % bias.shape[0]]
        products.append(product.astype(dtype))
    return products
