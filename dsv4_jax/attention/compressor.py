"""The compressor: what tokens are projected to, and how a window of them becomes an entry.

On the cache three others do it. `projections.project_tokens` multiplies a token with the weights of
all compressors at once (`weights_and_biases`), `LayerCacheHandle.append` keeps the products, and
`pallas_kernels/compressor` pools the windows that close, or `append_and_flush` in its own launch
where each row has one token. Over whole sequences, `compress_sequence` does all of it.

Source: deepseek_v4.md section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.params import CompressorParams
from dsv4_jax.attention.pooling import Pooling, repool
from dsv4_jax.cache.new_tokens import Projections
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.linear import linear
from pallas_kernels.common.norm_rope import rms_norm, rotate


def project(
    params: CompressorParams,
    x: jax.Array,
    positions: jax.Array,
    name: str = "comp",
    pooling: Pooling | None = None,
) -> Projections:
    """A token's value and score for the window it lies in, and on CSA layers for the next one.

    Args:
      params: parameters of the compressor.
      x: [..., D].
      positions: i32[...]; row `position % M` of the position bias is added to the score.
      name: what a capture of intermediates calls this compressor.
      pooling: an idea's, or None.

    Returns:
      f32[..., width] each: on CSA layers the b-stream, then the a-stream.
    """
    values = checkpoint_name(linear(x, params.wkv, dtype=jnp.float32), f"{name}/kv")
    scores = checkpoint_name(linear(x, params.wgate, dtype=jnp.float32), f"{name}/gate")
    new = Projections(values=values, scores=scores + params.ape[positions % params.ape.shape[0]])
    return repool(pooling, params, new, positions)


def weights_and_biases(
    compressors: Sequence[CompressorParams],
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """The weights of `project` for several compressors, values and scores in turns, and biases."""
    weights, biases = [], []
    for params in compressors:
        weights += [params.wkv, params.wgate]
        biases += [None, params.ape]
    return weights, biases


def compress_sequence(
    params: CompressorParams,
    x: jax.Array,
    frequencies: jax.Array,
    attn: AttentionType,
    config: DSV4Config,
    name: str = "comp",
) -> jax.Array:
    """Every entry of whole sequences.

    Args:
      params: parameters of the compressor.
      x: [B, T, D].
      frequencies: f32[R / 2], of the compress table.
      attn: CSA or HCA.
      config: the model.
      name: what a capture of intermediates calls this compressor.

    Returns:
      [B, T // M, C]; tokens of an open window give none.

    Source: deepseek_v4.md section 2.
    """
    compression_ratio = config.compression_ratio(attn)
    num_entries = x.shape[1] // compression_ratio
    tokens = jnp.arange(x.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(tokens[None], x.shape[:2])
    new = project(params, x, positions, name, config.idea.pooling)

    def windows(array: jax.Array) -> jax.Array:
        return array[:, : num_entries * compression_ratio].reshape(
            x.shape[0], num_entries, compression_ratio, array.shape[-1]
        )

    values, scores = windows(new.values), windows(new.scores)
    if attn == AttentionType.CSA:
        dim = params.norm.shape[0]
        values = _with_previous(values[..., :dim], values[..., dim:], 0.0)
        scores = _with_previous(scores[..., :dim], scores[..., dim:], -jnp.inf)
    mean = pool_windows(values, scores).astype(x.dtype)
    normed = rms_norm(mean, params.norm, eps=config.rms_norm_eps)
    starts = jnp.arange(num_entries) * compression_ratio
    return rotate(checkpoint_name(normed, f"{name}/normed"), starts, frequencies)


def pool_windows(values: jax.Array, scores: jax.Array) -> jax.Array:
    """The mean of each window's values, weighted channel by channel by a softmax of its scores.

    The cached layers pool token by token instead (`pallas_kernels/compressor/pooling.py`), so that
    an entry's bits do not depend on how its tokens came.

    Args:
      values: f32[B, E, M or 2 * M, C].
      scores: f32, likewise; minus infinity where there is no token.

    Returns:
      f32[B, E, C].
    """
    return jnp.sum(jax.nn.softmax(scores, axis=2) * values, axis=2)


def _with_previous(b_stream: jax.Array, a_stream: jax.Array, empty: float) -> jax.Array:
    """Puts the b-stream of window j - 1 before the a-stream of window j: [B, E, 2 * M, C]."""
    first = jnp.full_like(b_stream[:, :1], empty)
    previous = jnp.concatenate([first, b_stream[:, :-1]], axis=1)[:, : a_stream.shape[1]]
    return jnp.concatenate([previous, a_stream], axis=2)
