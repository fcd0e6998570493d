"""What tokens bring into their compression windows, where an idea changes that.

An entry is, channel by channel, the mean of its window's values, weighted by a softmax of their
scores. An idea changes values and scores of a token before they are pooled, so that layers that
keep a running softmax in the place of their tokens obey it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dsv4_jax import checks
from dsv4_jax.attention.params import CompressorParams
from dsv4_jax.cache.new_tokens import Projections


class WindowTokens(NamedTuple):
    """What tokens bring into their windows.

    Attributes:
      values: f32[..., S, C]. On CSA layers S is 2: a token's part in the next window's entry, then
        in its own. On HCA layers S is 1. C is the head dim, or the index head dim for index keys.
      scores: f32[..., S, C], finite: the logarithm of a value's weight, but for a constant of its
        window and channel.
      offsets: i32[...], place of the token in its own window, from 0.
      window_tokens: M, tokens of a window.
    """

    values: jax.Array
    scores: jax.Array
    offsets: jax.Array
    window_tokens: int


Pooling = Callable[[WindowTokens], WindowTokens]
"""Gives other values and scores, token by token; the rest of what it gives is not read."""


def repool(
    pooling: Pooling | None, params: CompressorParams, new: Projections, positions: jax.Array
) -> Projections:
    """Values and scores as an idea has them; without one, as they are.

    Args:
      pooling: of the idea, or None.
      params: parameters of the compressor.
      new: f32[..., S * C] each.
      positions: i32[...].

    Raises:
      ValueError: the function gives other shapes or dtypes.
    """
    if pooling is None:
        return new
    compression_ratio = params.ape.shape[0]
    shape = (*new.values.shape[:-1], -1, params.norm.shape[0])
    tokens = WindowTokens(
        new.values.reshape(shape),
        new.scores.reshape(shape),
        positions % compression_ratio,
        compression_ratio,
    )
    pooled = pooling(tokens)
    for name in ("values", "scores"):
        given: Any = getattr(pooled, name, None)
        wanted = getattr(tokens, name)
        if getattr(given, "shape", None) != wanted.shape or given.dtype != wanted.dtype:
            checks.refuse(f"{name} of a pooling", f"like {checks.shown(wanted)} that it got", given)
    return Projections(
        values=pooled.values.reshape(new.values.shape),
        scores=pooled.scores.reshape(new.scores.shape),
    )
