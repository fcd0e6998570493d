"""Hyper-connections (mHC): how a sublayer reads the residual streams and writes to them.

Source: deepseek_v4.md section 1.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.config import DSV4Config
from dsv4_jax.linear import grouped_linear
from dsv4_jax.model.params import HyperConnectionParams
from pallas_kernels import Backend, hyper_connections
from pallas_kernels.hyper_connections.reference import collapse, inverse_rms

_PARTS = 16


class HyperConnection(NamedTuple):
    """How one sublayer is connected to the streams.

    Attributes:
      normed: [..., D], what the sublayer reads.
      post: f32[..., S], weight of its output in each stream.
      comb: f32[..., S, S], from stream to stream; summed over its first index.
    """

    normed: jax.Array
    post: jax.Array
    comb: jax.Array


def read_streams(
    params: HyperConnectionParams,
    norm: jax.Array,
    streams: jax.Array,
    config: DSV4Config,
    name: str,
    *,
    backend: Backend | None = None,
) -> HyperConnection:
    """Steps 1 to 8, and the sublayer's norm: [..., S, D] -> a `HyperConnection`.

    Args:
      params: parameters of the hyper-connection.
      norm: [D], norm weight of the sublayer.
      streams: [..., S, D].
      config: the model.
      name: name of the connection in a capture of intermediates.
      backend: route of the op; only the reference can be differentiated.
    """
    lead, (num, dim) = streams.shape[:-2], streams.shape[-2:]
    rows = streams.reshape(-1, num, dim)
    reading = hyper_connections(
        _products(params, rows),
        params.scale,
        params.base,
        rows,
        norm,
        iters=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        backend=backend,
    )
    checkpoint_name(reading.collapsed.reshape(*lead, dim), f"{name}/collapsed")
    return HyperConnection(
        normed=reading.normed.reshape(*lead, dim),
        post=checkpoint_name(reading.post.reshape(*lead, num), f"{name}/post"),
        comb=checkpoint_name(reading.comb.reshape(*lead, num, num), f"{name}/comb"),
    )


def write_streams(connection: HyperConnection, streams: jax.Array, output: jax.Array) -> jax.Array:
    """Step 9: X'_k = post_k y + sum_j comb_jk X_j, in f32, rounded once.

    Args:
      connection: result of `read_streams`.
      streams: [..., S, D] that the sublayer read.
      output: [..., D], output of the sublayer.
    """
    written = connection.post[..., None] * output.astype(jnp.float32)[..., None, :]
    for j in range(streams.shape[-2]):
        stream = streams[..., j, None, :].astype(jnp.float32)
        written = written + connection.comb[..., j, :, None] * stream
    return written.astype(streams.dtype)


def collapse_streams(
    params: HyperConnectionParams, streams: jax.Array, config: DSV4Config
) -> jax.Array:
    """The collapse before a head: [..., S, D] -> [..., D], without Sinkhorn."""
    lead, (num, dim) = streams.shape[:-2], streams.shape[-2:]
    rows = streams.reshape(-1, num, dim)
    mix = jnp.sum(_products(params, rows), axis=1) * inverse_rms(rows, config.rms_norm_eps)
    weights = jax.nn.sigmoid(mix * params.scale[0] + params.base[None]) + config.hc_eps
    return collapse(weights, rows).reshape(*lead, dim)


def _products(params: HyperConnectionParams, streams: jax.Array) -> jax.Array:
    """All streams of a token as one vector, through `fn`: [T, S, D] -> f32[T, P, ...], in parts.

    A matrix of 24 rows keeps 24 of a GPU's SMs busy, one a row; cut into parts, all of them.
    """
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)
    rows, length = params.fn.shape
    parts = math.gcd(length, _PARTS)
    weight = params.fn.reshape(rows, parts, length // parts).swapaxes(0, 1)
    return grouped_linear(flat.reshape(-1, parts, length // parts), weight)
