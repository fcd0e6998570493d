"""Moves a few heads of one token through registers, a dim per lane, inside a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton

Ref = Any
_HEADS = 8
"""Of a program: at 64 heads and one token the programs still spread over the SMs."""


class Heads(NamedTuple):
    """A few heads of a token, and where they go.

    Attributes:
      source: [T, H, C].
      target: [T, H, C].
      token: i32[].
      number: i32[], which of `num_head_tiles`.
    """

    source: Ref
    target: Ref
    token: jax.Array
    number: jax.Array


def num_head_tiles(num_heads: int) -> int:
    """Programs that a token's heads take."""
    return pl.cdiv(num_heads, _HEADS)


def map_heads(function: Callable[[jax.Array], jax.Array], heads: Heads, *, width: int) -> None:
    """From [T, H, C] to the same place of another array, by a function of f32[heads, width].

    Args:
      function: sees zeros in lanes past the C dims, and in heads past the last one.
      heads: those to map.
      width: lanes, a power of two.
    """
    source, target, token, number = heads
    num_heads, dim = source.shape[1:]
    shape, first = (_HEADS, width), number * _HEADS
    if dim == width and num_heads % _HEADS == 0:  # whole tiles are moved in wide words
        at = (token, pl.ds(first, _HEADS), pl.ds(0, width))
        x = source[at].astype(jnp.float32)
        target[at] = function(x).astype(target.dtype)
        return
    # Indices of lanes that hold nothing stay inside the arrays; the mask drops them.
    head = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = (head < num_heads) & (lane < dim)
    index = (token, jnp.minimum(head, num_heads - 1), jnp.minimum(lane, dim - 1))
    # f32[heads, width], zeros where the mask drops.
    x = triton.load_where(source, index, mask).astype(jnp.float32)
    triton.store_where(target, index, function(x).astype(target.dtype), mask)
