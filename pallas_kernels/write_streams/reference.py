"""Definition of `write_streams`.

    X'_k     = post_k y + sum_j comb_jk X_j, in f32, rounded once
    products = fn X', all streams as one vector, in parts

Source: deepseek_v4.md section 1.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.pending import Output, finish

_PARTS = 16


class Arguments(NamedTuple):
    """The arguments of `op.write_streams`, which describes and checks them."""

    streams: jax.Array
    output: Output
    post: jax.Array
    comb: jax.Array
    fn: jax.Array


def write_streams(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.write_streams`."""
    output = finish(arguments.output)  # [T, D]
    written = mix(arguments.streams, output, arguments.post, arguments.comb)  # [T, S, D]
    return written, products(arguments.fn, written)  # f32[T, P, R]


def mix(streams: jax.Array, output: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """The streams after a sublayer: [..., S, D], [..., D], [..., S], [..., S, S] -> [..., S, D]."""
    written = post[..., None] * output.astype(jnp.float32)[..., None, :]  # f32[..., S, D]
    wide = jnp.unstack(streams.astype(jnp.float32), axis=-2)  # f32[..., D] of each stream
    for shares, stream in zip(jnp.unstack(comb, axis=-2), wide, strict=True):
        # f32[..., S, D]: a stream's share in each of those after it. One stream after another, in
        # order.
        written = written + shares[..., None] * stream[..., None, :]
    return written.astype(streams.dtype)


def products(fn: jax.Array, streams: jax.Array) -> jax.Array:
    """f32[R, S * D] times [T, S, D] -> f32[T, P, R], in parts.

    A matrix of 24 rows keeps 24 of a GPU's SMs busy, one a row; cut into parts, all of them.
    """
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)  # f32[T, S * D]
    rows, length = fn.shape
    parts = math.gcd(length, _PARTS)
    vectors = flat.reshape(-1, parts, length // parts)  # f32[T, P, S * D / P]
    weight = fn.astype(jnp.float32).reshape(rows, parts, length // parts)  # f32[R, P, S * D / P]
    return jnp.einsum("tpc,rpc->tpr", vectors, weight, precision=jax.lax.Precision.HIGHEST)
