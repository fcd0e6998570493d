"""`norm_rope.py` on a tile, a dim per lane, inside a Triton kernel: same roundings, same order.

A tile is f32[..., width], width a power of two; lanes past the C dims hold zeros. Nothing is
summed in an order that a layout chooses, so the bits of a vector are the same whatever the number
of warps, the vectors beside it or the shape of the call.

Against `norm_rope.py`, on a GPU, rsqrt, sine, cosine and one division may differ in their last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.rounding import rounded
from pallas_kernels.gpu import triton

Ref = Any


class RopeTable(NamedTuple):
    """The norm and RoPE of vectors, loaded before them so that nobody waits for it.

    Attributes:
      weight: f32[width], norm weight; None for a norm without one.
      frequency: f32[width / 2], per pair of dims; 0 where they do not rotate.
      dim: C.
      num_rotated: R / 2, the last pairs of the C dims.
      dtype: of activations.
      eps: floor of the norm.
    """

    weight: jax.Array | None
    frequency: jax.Array
    dim: int
    num_rotated: int
    dtype: DTypeLike
    eps: float


def load_rope_table(
    norm_ref: Ref | None,
    frequencies_ref: Ref,
    *,
    dim: int,
    width: int,
    dtype: DTypeLike,
    eps: float = 0.0,
) -> RopeTable:
    """Loads a norm weight [C] and f32[R / 2]; `rotate` reads neither the weight nor `eps`."""
    num_rotated = frequencies_ref.shape[0]
    weight = None
    if norm_ref is not None:
        weight = triton.load_row(norm_ref, (), start=0, count=dim, width=width)
        weight = weight.astype(jnp.float32)
    pair = jnp.arange(width // 2) - (dim // 2 - num_rotated)  # from the first that rotates
    # Pairs that do not rotate read a frequency that there is, and drop it.
    frequency = frequencies_ref[jnp.clip(pair, 0, num_rotated - 1)]
    frequency = jnp.where((pair >= 0) & (pair < num_rotated), frequency, 0.0)
    return RopeTable(weight, frequency, dim, num_rotated, dtype, eps)


def norm_and_rotate(x: jax.Array, table: RopeTable, position: jax.Array) -> jax.Array:
    """f32[..., width], norm and RoPE at a position i32[], each rounded to activations' dtype."""
    # Squares are rounded before they are added: fused, they would differ from the reference's.
    mean_square = sum_by_pairs(triton.exact_product(x, x)) / table.dim  # f32[...], of C dims
    scaled = x * beside(jax.lax.rsqrt(mean_square + table.eps), x.shape)
    if table.weight is not None:
        scaled = scaled * jnp.broadcast_to(table.weight, x.shape)
    return rotate(round_to_dtype(scaled, table.dtype), table, position)


def rotate(x: jax.Array, table: RopeTable, position: jax.Array) -> jax.Array:
    """RoPE of the last R of the C dims, rounded; the others stay. -position is inverse RoPE."""
    *lead, width = x.shape
    pairs = (*lead, width // 2)
    pair = jnp.arange(width // 2) - (table.dim // 2 - table.num_rotated)
    rotated = jnp.broadcast_to((pair >= 0) & (pair < table.num_rotated), pairs)
    angle = triton.exact_product(
        jnp.broadcast_to(position.astype(jnp.float32), width // 2), table.frequency
    )
    sin, cos = (jnp.broadcast_to(part, pairs) for part in triton.sin_cos(angle))
    # A pair lies in neighbouring lanes, which one thread holds.
    a, b = split_neighbours(x, 2)  # f32[..., width / 2] each
    product = triton.exact_product
    # No product is fused into the sum, which would round once less than the reference does.
    rotated_a = round_to_dtype(product(a, cos) - product(b, sin), table.dtype)
    rotated_b = round_to_dtype(product(b, cos) + product(a, sin), table.dtype)
    return join_neighbours([jnp.where(rotated, rotated_a, a), jnp.where(rotated, rotated_b, b)])


def round_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """f32 rounded to f32 or bf16, as f32; `rounding.round_to` gives the dtype itself."""
    return x if jnp.dtype(dtype) == jnp.float32 else triton.round_to_bf16(x)


def beside(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """f32[...] for every lane of f32[..., width]; a scalar as it is."""
    return jnp.broadcast_to(x[..., None], shape) if x.shape else x


def split_neighbours(x: jax.Array, count: int) -> list[jax.Array]:
    """f32[..., n] -> `count`, a power of two, of f32[..., n / count]: lanes i, i + count, ..."""
    if count == 1:
        return [x]
    # As pairs in a last axis of two, which is what Triton can split.
    pairs = (*x.shape[:-1], x.shape[-1] // 2)
    halves = jax.lax.split(x.reshape(*pairs, 2), (1, 1), axis=len(pairs))
    even, odd = (split_neighbours(half.reshape(pairs), count // 2) for half in halves)
    return [part for both in zip(even, odd, strict=True) for part in both]


def join_neighbours(parts: list[jax.Array]) -> jax.Array:
    """The inverse of `split_neighbours`."""
    while len(parts) > 1:
        pairs = zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)
        parts = [jnp.stack(pair, axis=-1).reshape(*pair[0].shape[:-1], -1) for pair in pairs]
    return parts[0]


def sum_by_pairs(x: jax.Array) -> jax.Array:
    """f32[..., width] -> f32[...], in the order of `norm_rope.sum_by_pairs`.

    Neighbours lie in one thread or one warp until a warp has one sum left. XLA would make one sum
    of them all, in an order of its own, were there nothing in between.
    """
    *lead, width = x.shape
    while width > 1:
        width //= 2
        x = jnp.sum(x.reshape(*lead, width, 2), axis=-1)
        x = rounded(x) if interpreting() else x
    return jnp.sum(x, axis=-1)
