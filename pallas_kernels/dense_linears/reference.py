"""Definition of `dense_linears`: x W^T + b[position % M], in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import reference
from pallas_kernels.dense_linears.arguments import Arguments


def dense_linears(arguments: Arguments) -> list[jax.Array]:
    """See `op.dense_linears`."""
    x, weights, biases, positions = arguments
    products = []
    for weight, bias in zip(weights, biases, strict=True):
        product = reference.block_linear(x[None], weight[None])[0].astype(jnp.float32)
        products.append(product if bias is None else product + bias[positions % bias.shape[0]])
    return products
