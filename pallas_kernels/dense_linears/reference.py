"""Definition of `dense_linears`: x W^T + b[position % M], in f32."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import reference


def dense_linears(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    positions: jax.Array,
) -> list[jax.Array]:
    """See `op.dense_linears`."""
    products = []
    for weight, bias in zip(weights, biases, strict=True):
        product = reference.block_linear(x[None], weight[None])[0].astype(jnp.float32)
        products.append(product if bias is None else product + bias[positions % bias.shape[0]])
    return products
