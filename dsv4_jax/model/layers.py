"""Stream mixing (mHC): how a sublayer reads the residual streams and writes to them.

Source: deepseek_v4.md section 1.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.projections import linear
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import StreamMixParams


class StreamMix(NamedTuple):
    """One mixing.

    Attributes:
      collapsed: [..., D], what the sublayer reads.
      post: f32[..., S], weight of its output in each stream.
      comb: f32[..., S, S], how streams mix; summed over its first index.
    """

    collapsed: jax.Array
    post: jax.Array
    comb: jax.Array


def read_streams(
    params: StreamMixParams, streams: jax.Array, config: DSV4Config, name: str
) -> StreamMix:
    """Steps 1 to 8: [..., S, D] -> a `StreamMix`; `name` is what a capture calls it."""
    num = config.hc_mult
    mix = _normed_mix(params, streams, config)
    base = jnp.expand_dims(params.base, range(mix.ndim - 1))
    pre = jax.nn.sigmoid(mix[..., :num] * params.scale[0] + base[..., :num]) + config.hc_eps
    post = 2 * jax.nn.sigmoid(mix[..., num : 2 * num] * params.scale[1] + base[..., num : 2 * num])
    logits = mix[..., 2 * num :] * params.scale[2] + base[..., 2 * num :]
    comb = _sinkhorn(logits.reshape(*logits.shape[:-1], num, num), config)
    return StreamMix(
        collapsed=checkpoint_name(_collapse(pre, streams), f"{name}/collapsed"),
        post=checkpoint_name(post, f"{name}/post"),
        comb=checkpoint_name(comb, f"{name}/comb"),
    )


def write_streams(mix: StreamMix, streams: jax.Array, output: jax.Array) -> jax.Array:
    """Step 9: X'_k = post_k y + sum_j comb_jk X_j, in f32, rounded once.

    Args:
      mix: of the sublayer.
      streams: [..., S, D] that the sublayer read.
      output: [..., D] of the sublayer.
    """
    mixed = mix.post[..., None] * output.astype(jnp.float32)[..., None, :]
    for j in range(streams.shape[-2]):
        stream = streams[..., j, None, :].astype(jnp.float32)
        mixed = mixed + mix.comb[..., j, :, None] * stream
    return mixed.astype(streams.dtype)


def collapse_streams(params: StreamMixParams, streams: jax.Array, config: DSV4Config) -> jax.Array:
    """The collapse before a head: [..., S, D] -> [..., D], without Sinkhorn."""
    mix = _normed_mix(params, streams, config)
    base = jnp.expand_dims(params.base, range(mix.ndim - 1))
    return _collapse(jax.nn.sigmoid(mix * params.scale[0] + base) + config.hc_eps, streams)


def _normed_mix(params: StreamMixParams, streams: jax.Array, config: DSV4Config) -> jax.Array:
    """All streams of a token as one vector, through `fn`, over that vector's RMS; f32."""
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    mean_square = jnp.mean(flat * flat, axis=-1, keepdims=True)
    return linear(flat, params.fn) * jax.lax.rsqrt(mean_square + config.rms_norm_eps)


def _collapse(weights: jax.Array, streams: jax.Array) -> jax.Array:
    collapsed = jnp.zeros(streams.shape[:-2] + streams.shape[-1:], jnp.float32)
    for j in range(streams.shape[-2]):
        collapsed = collapsed + weights[..., j, None] * streams[..., j, :].astype(jnp.float32)
    return collapsed.astype(streams.dtype)


def _sinkhorn(logits: jax.Array, config: DSV4Config) -> jax.Array:
    """Softmax of each row, then columns and rows in turn; columns last, so they sum to 1."""
    eps = config.hc_eps

    def columns(p: jax.Array) -> jax.Array:
        return p / (jnp.sum(p, axis=-2, keepdims=True) + eps)

    def rows_then_columns(_: jax.Array, p: jax.Array) -> jax.Array:
        return columns(p / (jnp.sum(p, axis=-1, keepdims=True) + eps))

    start = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.fori_loop(0, config.hc_sinkhorn_iters - 1, rows_then_columns, start)
