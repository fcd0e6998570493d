"""Definition in jnp of `compress_csa` and `compress_hca`: closed windows into entries.

This is the maths of a compressor. `triton_pool.py` spells it for one window inside a kernel.

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
from pallas_kernels.compressor.arguments import Windows
from pallas_kernels.compressor.arrays import Compressor


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
    largest, total, weighted = pool[:, 0], pool[:, 1], pool[:, 2]
    new_largest = jnp.maximum(largest, score)
    keep, add = jnp.exp(largest - new_largest), jnp.exp(score - new_largest)
    total = rounded(total * keep) + add
    weighted = rounded(weighted * keep) + rounded(value * add)
    folded = jnp.stack([new_largest, total, weighted], axis=1)
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
        token = jnp.clip(start + i, 0, values.shape[0] - 1)
        return fold(pool, values[token], scores[token], i < count)

    return jax.lax.fori_loop(0, max_count, body, pool)


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
    mean = pool[:, 2] / pool[:, 1]
    return rotate(
        rms_norm_by_pairs(round_to(mean, norm.dtype), norm, eps=eps), positions, frequencies
    )


def compress_csa(compressor: Compressor, windows: Windows) -> jax.Array:
    """Entry j pools the b-stream of window j - 1 and the a-stream of window j.

    rate 2, closing token at p = 5:   positions  2  3 | 4  5
                                      streams    b  b | a  a     state row p % 4

    Args:
      compressor: its state as it was before the call; `pool` and `codec` are not read.
      windows: those that the call closes.

    Returns:
      [n, C] in the dtype of the norm's weight; what -1 gives is arbitrary.
    """
    call, frequencies, closing, layer, rate, eps = windows
    state, (values, scores) = compressor.state, _values_and_scores(compressor)
    assert isinstance(state, dict)
    token = jnp.maximum(closing, 0)[:, None]
    back = jnp.arange(2 * rate - 1, -1, -1, dtype=jnp.int32)[None]
    source = jnp.maximum(token - back, 0)
    slot, position = call.slots[token], call.positions[token] - back
    row = (jnp.maximum(slot, 0), jnp.maximum(position, 0) % (2 * rate))
    in_call, there = ((position >= n)[..., None] for n in (call.lengths[token], 0))
    channels = values.shape[-1] // 2

    def own_stream(rows: jax.Array, stored: jax.Array, absent: float) -> jax.Array:
        both = jnp.where(in_call, rows[source], stored[layer, *row])
        own = jnp.where((back >= rate)[..., None], both[..., :channels], both[..., channels:])
        return jnp.where(there, own, absent)

    values = own_stream(values, state["values"], 0.0)
    scores = own_stream(scores, state["scores"], -jnp.inf)
    pool = _pool_at_once(jnp.unstack(values, axis=1), jnp.unstack(scores, axis=1))
    return finish_entry(pool, compressor.norm, frequencies, position[:, rate], eps=eps)


def _pool_at_once(values: Sequence[jax.Array], scores: Sequence[jax.Array]) -> jax.Array:
    """f32[n, 3, C], the pool of tokens of which every value and score f32[n, C] is at hand."""
    largest = functools.reduce(jnp.maximum, scores)
    weights = [jnp.exp(score - largest) for score in scores]
    weighted = [rounded(w * value) for w, value in zip(weights, values, strict=True)]
    total = functools.reduce(jnp.add, weights)
    return jnp.stack([largest, total, functools.reduce(jnp.add, weighted)], axis=1)


def compress_hca(compressor: Compressor, windows: Windows) -> jax.Array:
    """Entry j pools window j: what the running softmax holds of it, then this call's tokens.

    Arguments and result as in `compress_csa`.
    """
    call, frequencies, closing, layer, rate, eps = windows
    running, (values, scores) = compressor.state, _values_and_scores(compressor)
    assert not isinstance(running, dict)
    token = jnp.maximum(closing, 0)
    end, length = call.positions[token], call.lengths[token]
    begin = end - (rate - 1)
    first = jnp.maximum(begin, length)
    carried = (begin < length)[:, None, None]
    old = running[layer, jnp.maximum(call.slots[token], 0)]
    pool = fold_tokens(
        jnp.where(carried, old, empty_pool(closing.shape[0], values.shape[-1])),
        values,
        scores,
        start=token - (end - first),
        count=end - first + 1,
        max_count=min(call.max_row_tokens, rate),
    )
    return finish_entry(pool, compressor.norm, frequencies, begin, eps=eps)


def _values_and_scores(compressor: Compressor) -> tuple[jax.Array, jax.Array]:
    return compressor.rows["values"], compressor.rows["scores"]
