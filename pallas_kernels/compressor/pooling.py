"""The maths of a compressor in jnp: tokens into a pool, and a pool into an entry.

`reference.py` says which tokens. `triton_pool.py` spells this for one window inside a kernel.

An entry is, channel by channel, the softmax-weighted mean of its window's values:

    e[c] = sum_t exp(z_t[c]) kv_t[c] / sum_t exp(z_t[c])

Sums run over tokens in the order of their positions, so that an entry's bits do not depend on how
the tokens were cut into calls. A CSA window is pooled in two passes, its largest score first. An
HCA window is pooled as a running softmax, a token after the other as they come: a pool is
f32[..., 3, C], the largest score, the sum of exp(score - largest), and that sum weighted by value.
Against two passes in float64 over 128 tokens its mean is off by at most 8.3e-7 of itself (values of
one sign; random, equal, ascending and spiked scores).

Source: deepseek_v4.md section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.norm_rope import rms_norm_by_pairs, rotate
from pallas_kernels.common.rounding import round_to, rounded


def empty_pool(num_windows: int, channels: int) -> jax.Array:
    """f32[n, 3, C], a pool of no tokens."""
    pool = jnp.zeros((num_windows, 3, channels), jnp.float32)
    return pool.at[:, 0].set(-jnp.inf)


def fold(pool: jax.Array, value: jax.Array, score: jax.Array, valid: jax.Array) -> jax.Array:
    """Adds one token to each pool.

    Args:
      pool: f32[n, 3, C].
      value: f32[n, C].
      score: f32[n, C], finite where valid.
      valid: bool[n]; a pool stays as it was, bit for bit, where False.
    """
    largest, total, weighted = pool[:, 0], pool[:, 1], pool[:, 2]  # f32[n, C] each
    new_largest = jnp.maximum(largest, score)  # f32[n, C]
    keep, add = jnp.exp(largest - new_largest), jnp.exp(score - new_largest)
    total = rounded(total * keep) + add
    weighted = rounded(weighted * keep) + rounded(value * add)
    folded = jnp.stack([new_largest, total, weighted], axis=1)  # f32[n, 3, C]
    return jnp.where(valid[:, None, None], folded, pool)


def fold_tokens(
    pool: jax.Array,
    values: jax.Array,
    scores: jax.Array,
    *,
    start: jax.Array,
    count: jax.Array,
    max_count: int,
) -> jax.Array:
    """Folds tokens start .. start + count - 1 of a call into each pool.

    Args:
      pool: f32[n, 3, C].
      values: f32[T, C].
      scores: f32[T, C].
      start: i32[n], first token of each pool.
      count: i32[n], tokens of each pool.
      max_count: the largest count there can be.
    """

    def body(i: jax.Array, pool: jax.Array) -> jax.Array:
        token = jnp.clip(start + i, 0, values.shape[0] - 1)  # i32[n]
        return fold(pool, values[token], scores[token], i < count)

    return jax.lax.fori_loop(0, max_count, body, pool)


def pool_at_once(values: Sequence[jax.Array], scores: Sequence[jax.Array]) -> jax.Array:
    """f32[n, 3, C], the pool of tokens of which every value and score f32[n, C] is at hand."""
    largest = functools.reduce(jnp.maximum, scores)  # f32[n, C]
    weights = [jnp.exp(score - largest) for score in scores]  # f32[n, C] each
    weighted = [rounded(w * value) for w, value in zip(weights, values, strict=True)]
    total = functools.reduce(jnp.add, weights)  # f32[n, C]
    return jnp.stack([largest, total, functools.reduce(jnp.add, weighted)], axis=1)


def finish_entry(
    pool: jax.Array,
    norm: jax.Array,
    frequencies: jax.Array,
    positions: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """A pool into an entry: mean, norm, rotation, each rounded to the dtype of `norm`.

    Args:
      pool: f32[n, 3, C].
      norm: [C], weight; its dtype is that of activations.
      frequencies: f32[R / 2].
      positions: i32[n], first position of each window.
      eps: floor of the norm.
    """
    mean = pool[:, 2] / pool[:, 1]  # f32[n, C]
    return rotate(
        rms_norm_by_pairs(round_to(mean, norm.dtype), norm, eps=eps), positions, frequencies
    )
