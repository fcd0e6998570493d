"""Definition of `write_streams`.

    X'_k     = post_k y + sum_j comb_jk X_j, in f32, rounded once
    products = fn X', all streams as one vector, in parts

Source: deepseek_v4.md section 1.2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.common.pending import finish
from pallas_kernels.write_streams.arguments import Arguments

_PARTS = 16


def write_streams(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.write_streams`."""
    streams, output, post, comb, fn = arguments
    written = mix(streams, finish(output), post, comb)
    return written, products(fn, written)


def mix(streams: jax.Array, output: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """The streams after a sublayer: [..., S, D], [..., D], [..., S], [..., S, S] -> [..., S, D]."""
    written = post[..., None] * output.astype(jnp.float32)[..., None, :]
    wide = jnp.unstack(streams.astype(jnp.float32), axis=-2)
    for shares, stream in zip(jnp.unstack(comb, axis=-2), wide, strict=True):
        written = written + shares[..., None] * stream[..., None, :]
    return written.astype(streams.dtype)


def products(fn: jax.Array, streams: jax.Array) -> jax.Array:
    """f32[R, S * D] times [T, S, D] -> f32[T, P, R], in parts.

    A matrix of 24 rows keeps 24 of a GPU's SMs busy, one a row; cut into parts, all of them.
    """
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)
    rows, length = fn.shape
    parts = math.gcd(length, _PARTS)
    vectors = flat.reshape(-1, parts, length // parts)
    weight = fn.astype(jnp.float32).reshape(rows, parts, length // parts)
    return jnp.einsum("tpc,rpc->tpr", vectors, weight, precision=jax.lax.Precision.HIGHEST)
