"""Definition of `hyper_connections`.

    m       = sum over parts of products / sqrt(mean(X^2) + norm_eps)
    pre_j   = sigmoid(m_j s_0 + b_j) + eps                 post_j = 2 sigmoid(m_(S+j) s_1 + b_(S+j))
    Z_jk    = m_(2S+Sj+k) s_2 + b_(2S+Sj+k)                comb = Sinkhorn(Z)
    u       = sum_j pre_j X_j, rounded                     normed = rms(u) * norm, rounded

Shifted, u is made with weights that are given, those of the connection before.

Source: deepseek_v4.md section 1.2, deepseek_v41.md section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.norm_rope import rms_norm


class Arguments(NamedTuple):
    """The arguments of `op.hyper_connections`, which describes and checks them."""

    products: jax.Array
    scale: jax.Array
    base: jax.Array
    streams: jax.Array
    norm: jax.Array
    iters: int
    eps: float
    norm_eps: float
    weights: jax.Array | None = None


class Reading(NamedTuple):
    """What `hyper_connections` gives.

    Attributes:
      collapsed: [T, D], the weighted sum of the streams.
      normed: [T, D], that normed: the sublayer's input.
      post: f32[T, S], weight of the sublayer's output in each stream.
      comb: f32[T, S, S], from stream to stream; summed over its first index.
      pre: f32[T, S], where the streams were summed with weights that were given; else None.
    """

    collapsed: jax.Array
    normed: jax.Array
    post: jax.Array
    comb: jax.Array
    pre: jax.Array | None = None


def hyper_connections(arguments: Arguments) -> Reading:
    """See `op.hyper_connections`."""
    pre, post, comb = mixes(arguments)
    weights = arguments.weights
    collapsed = collapse(pre if weights is None else weights, arguments.streams)  # [T, D]
    normed = rms_norm(collapsed, arguments.norm, eps=arguments.norm_eps)  # [T, D]
    own = None if weights is None else pre
    return Reading(collapsed=collapsed, normed=normed, post=post, comb=comb, pre=own)


def mixes(arguments: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights pre and post, f32[T, S] each, and comb, f32[T, S, S]; the norm weight is not read."""
    streams, scale, base = arguments.streams, arguments.scale, arguments.base[None]
    eps, norm_eps = arguments.eps, arguments.norm_eps
    count, num, _ = streams.shape  # T, S, D
    mix = jnp.sum(arguments.products, axis=1)  # f32[T, (2 + S) * S]
    mix = mix * inverse_rms(streams, norm_eps)  # f32[T, (2 + S) * S]
    pre = jax.nn.sigmoid(mix[:, :num] * scale[0] + base[:, :num]) + eps  # f32[T, S], as post
    post = 2 * jax.nn.sigmoid(
        mix[:, num : 2 * num] * scale[1] + base[:, num : 2 * num]
    )  # f32[T, S]
    logits = mix[:, 2 * num :] * scale[2] + base[:, 2 * num :]  # f32[T, S * S]
    comb = sinkhorn(logits.reshape(count, num, num), iters=arguments.iters, eps=eps)
    return pre, post, comb


def inverse_rms(streams: jax.Array, eps: float) -> jax.Array:
    """[T, S, D] -> f32[T, 1]: one over the RMS of a token's streams as one vector."""
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)  # f32[T, S * D]
    return jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + eps)


def collapse(weights: jax.Array, streams: jax.Array) -> jax.Array:
    """f32[T, S] and [T, S, D] -> [T, D]: the weighted sum of the streams, in f32, rounded once."""
    collapsed = jnp.zeros((streams.shape[0], streams.shape[2]), jnp.float32)  # f32[T, D]
    wide = jnp.unstack(streams.astype(jnp.float32), axis=1)
    for weight, stream in zip(jnp.unstack(weights, axis=1), wide, strict=True):
        collapsed = collapsed + weight[:, None] * stream
    return collapsed.astype(streams.dtype)


def sinkhorn(logits: jax.Array, *, iters: int, eps: float) -> jax.Array:
    """Softmax of each row, then columns and rows in turn; columns last, so they sum to 1.

    Args:
      logits: f32[T, S, S].
      iters: how often columns are normalised.
      eps: added to the softmax and to every sum.
    """

    def columns(p: jax.Array) -> jax.Array:
        return p / (jnp.sum(p, axis=-2, keepdims=True) + eps)

    def rows_then_columns(_: jax.Array, p: jax.Array) -> jax.Array:
        return columns(p / (jnp.sum(p, axis=-1, keepdims=True) + eps))

    start = columns(jax.nn.softmax(logits, axis=-1) + eps)  # f32[T, S, S]
    return jax.lax.fori_loop(0, iters - 1, rows_then_columns, start)
