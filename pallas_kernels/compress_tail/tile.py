"""The maths of `reference.py` on one window at a time, a channel per lane, inside a Triton kernel.

A tile is f32[width], width a power of two; lanes past the entry's C channels hold zeros. Every
step rounds as the reference does and none sums in an order that a layout chooses, so the bits of
an entry are the same whatever the number of warps or the shape of the call.

Against the reference, on a GPU, exp, rsqrt, sin, cos and one division may differ in their last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import triton

Ref = Any
Pool = tuple[jax.Array, jax.Array, jax.Array]


def empty_pool(width: int) -> Pool:
    """Largest score, sum of exponentials and weighted sum of no tokens."""
    zeros = jnp.zeros(width, jnp.float32)
    return jnp.full(width, -jnp.inf, jnp.float32), zeros, zeros


def fold(pool: Pool, value: jax.Array, score: jax.Array, valid: jax.Array) -> Pool:
    """Adds a token, or leaves the pool as it was where `valid`, a scalar, is False."""
    largest, total, weighted = pool
    new_largest = jnp.maximum(largest, score)
    keep, add = jnp.exp(largest - new_largest), jnp.exp(score - new_largest)
    folded = (
        new_largest,
        triton.exact_product(total, keep) + add,
        triton.exact_product(weighted, keep) + triton.exact_product(value, add),
    )
    return _select_pool(valid, folded, pool)


def select(condition: jax.Array, chosen: jax.Array, other: jax.Array) -> jax.Array:
    """One of two tiles, by a scalar."""
    return jnp.where(jnp.broadcast_to(condition, chosen.shape), chosen, other)


def _select_pool(condition: jax.Array, chosen: Pool, other: Pool) -> Pool:
    largest, total, weighted = (select(condition, a, b) for a, b in zip(chosen, other, strict=True))
    return largest, total, weighted


def continue_pool(
    ref: Ref, index: tuple[jax.Array, ...], carried: jax.Array, *, width: int
) -> Pool:
    """The pool at [index] of f32[L, NS, 3, C], or the empty one where `carried` is False."""
    channels = ref.shape[-1]
    largest, total, weighted = (
        triton.load_row(ref, (*index, row), start=0, count=channels, width=width, live=carried)
        for row in range(3)
    )
    return _select_pool(carried, (largest, total, weighted), empty_pool(width))


def fold_tokens(
    pool: Pool, row_refs: Sequence[Ref], *, start: jax.Array, count: jax.Array, chunk: int
) -> Pool:
    """Folds rows start .. start + count - 1 of values and scores f32[T, C], `chunk` in flight."""
    num_rows, channels = row_refs[0].shape
    width = pool[0].shape[0]

    def fold_chunk(number: jax.Array, pool: Pool) -> Pool:
        first = number * chunk
        tokens = []
        for place in range(chunk):
            valid = first + place < count
            row = (jnp.clip(start + first + place, 0, num_rows - 1),)
            loaded = (
                triton.load_row(ref, row, start=0, count=channels, width=width, live=valid)
                for ref in row_refs
            )
            tokens.append((*loaded, valid))
        for value, score, valid in tokens:
            pool = fold(pool, value, score, valid)
        return pool

    if chunk == 1:
        return fold_chunk(jnp.int32(0), pool)
    return jax.lax.fori_loop(0, (count + chunk - 1) // chunk, fold_chunk, pool)


def finish_entry(
    pool: Pool,
    norm_ref: Ref,
    frequencies_ref: Ref,
    position: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """f32[width], a pool's mean, normed and rotated, each rounded to the dtype of the norm.

    Args:
      pool: of the whole window.
      norm_ref: [C].
      frequencies_ref: f32[R / 2].
      position: i32[], first position of the window.
      eps: floor of the norm.
    """
    _, total, weighted = pool
    width, dim, dtype = total.shape[0], norm_ref.shape[0], norm_ref.dtype
    lane = jnp.arange(width)
    mean = weighted / total
    if dim < width:
        mean = jnp.where(lane < dim, mean, 0.0)
    mean = round_to(mean, dtype)
    mean_square = sum_by_halves(triton.exact_product(mean, mean)) / dim
    weight = triton.load_row(norm_ref, (), start=0, count=dim, width=width)
    scaled = mean * jax.lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32)
    return rotate(round_to(scaled, dtype), frequencies_ref, position, dim=dim, dtype=dtype)


def sum_by_halves(x: jax.Array) -> jax.Array:
    """f32[width] -> f32[], adding halves, in the order of `rms_norm_by_halves`."""
    while x.shape[0] > 1:
        x = jnp.sum(x.reshape(2, x.shape[0] // 2), axis=0)
    return jnp.sum(x)


def rotate(
    x: jax.Array, frequencies_ref: Ref, position: jax.Array, *, dim: int, dtype: DTypeLike
) -> jax.Array:
    """Rotary embedding of channels dim - R .. dim - 1, rounded to `dtype`; the others stay."""
    pairs, num_rotated = x.shape[0] // 2, frequencies_ref.shape[0]
    pair = jnp.arange(pairs) - (dim // 2 - num_rotated)
    frequency = frequencies_ref[jnp.clip(pair, 0, num_rotated - 1)]
    rotated = (pair >= 0) & (pair < num_rotated)
    angle = triton.exact_product(
        jnp.broadcast_to(position.astype(jnp.float32), pairs), jnp.where(rotated, frequency, 0.0)
    )
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = (half.reshape(pairs) for half in jax.lax.split(x.reshape(pairs, 2), (1, 1), axis=1))
    product = triton.exact_product
    turned_a = round_to(product(a, cos) - product(b, sin), dtype)
    turned_b = round_to(product(b, cos) + product(a, sin), dtype)
    both = [jnp.where(rotated, turned_a, a), jnp.where(rotated, turned_b, b)]
    return jnp.stack(both, axis=-1).reshape(x.shape)


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """F32 rounded to f32 or bf16, as f32: from its bits, since conversions there and back may go.

    Half an ulp of bf16 is added, or a bit less where the bit above it is even.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & 1)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(bits, jnp.float32))
