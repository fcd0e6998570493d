"""What `codecs.py` does, on one entry at a time, a dim per lane, in a Triton kernel.

Element types are encoded by `numbers.py` itself, from bits. Only what a tile spells differently is
here: groups, the Hadamard rotation, and bytes packed into the words of `triton.as_words`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.common import numbers
from pallas_kernels.common.codecs import (
    Codec,
    FP4KeyCodec,
    FP8KeyCodec,
    GroupedFP8Codec,
    PlainCodec,
    ScaledFP8Codec,
    WholeFP8Codec,
)
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_rope import beside, join_neighbours, round_to_dtype, split_neighbours

Ref = Any
_AMAX_FLOOR = np.float32(1e-4)
_NEIGHBOURS = 4
"""Lanes that a thread holds of 128 in a warp."""
_WORD_CODES = 8
"""Of four bits; rows of fewer are bytes, which the codes of neighbours together do not divide."""


class Lanes(NamedTuple):
    """A plane's elements of one entry.

    Attributes:
      values: [width] in the plane's dtype, or u32 codes.
      first: the lane of the first element.
      size: how many there are.
      bits: of a code; 0 where values are not codes.
    """

    values: jax.Array
    first: int
    size: int
    bits: int = 0


def tile_width(codec: Codec, dim: int) -> int:
    """Lanes for an entry: a power of two that makes whole groups, and 8 of the grouped entry's."""
    least = 8 * codec.group if isinstance(codec, GroupedFP8Codec) else 128
    return max(least, pl.next_power_of_2(dim))


def encode(codec: Codec, x: jax.Array, *, dim: int, rope_dim: int) -> dict[str, Lanes]:
    """f32[width] -> the codec's planes; lanes from `dim` on are zeros.

    Raises:
      NotImplementedError: this codec has no form for a tile.
    """
    match codec:
        case PlainCodec():
            return {"values": Lanes(x.astype(codec.dtype), 0, dim)}
        case GroupedFP8Codec():
            return _encode_grouped(codec, x, dim - rope_dim, rope_dim)
        case ScaledFP8Codec():
            return _encode_scaled(x, dim - rope_dim, rope_dim)
        case WholeFP8Codec():
            return _encode_whole(codec, x, dim)
        case FP8KeyCodec():
            return _encode_fp8_key(x, dim)
        case FP4KeyCodec():
            return _encode_fp4_key(codec, x, dim)
    raise NotImplementedError(f"no kernel encodes {type(codec).__name__}; pass backend='reference'")


def store_entry(
    planes: Mapping[str, Ref], index: tuple[jax.Array, ...], encoded: Mapping[str, Lanes]
) -> None:
    """Writes one entry at [index] of planes [L, NB, EB, ...], byte planes as words or not."""
    for name, lanes in encoded.items():
        ref, values, count = planes[name], lanes.values, lanes.size
        # A plane of one number for each entry has no last axis.
        if not values.shape:
            ref[index] = values
            continue
        if lanes.bits:
            per_element = ref.dtype.itemsize * 8 // lanes.bits
            values = pack(values, lanes.bits, per_element).astype(ref.dtype)
            count = pl.cdiv(count, per_element)
        triton.store_row(ref, index, values, first=lanes.first, count=count)


def pack(codes: jax.Array, bits: int, count: int) -> jax.Array:
    """u32[n] -> u32[n / count]: `count` neighbouring codes in one element, the first one lowest."""
    if count == 1:
        return codes
    # Codes do not overlap once shifted: their sum is their union, and exact in any order.
    shift = jnp.arange(count, dtype=jnp.uint32)[None] * bits
    shifted = codes.reshape(-1, count) << jnp.broadcast_to(shift, (codes.shape[0] // count, count))
    return jnp.sum(shifted, axis=1, dtype=jnp.uint32)


def round_through(codec: Codec, x: jax.Array, *, dim: int) -> jax.Array:
    """`codecs.round_through` of index vectors, f32[n, width]; lanes from `dim` on are zeros.

    Raises:
      NotImplementedError: this codec has no form for a tile.
    """
    match codec:
        case PlainCodec():
            return round_to_dtype(x, codec.dtype)
        case FP8KeyCodec():
            codes, scale = _quantize_fp8_key(x, dim)
            wide = numbers.decode_ue8m0(scale)
            parts = [numbers.decode_e4m3(code) * beside(wide, code.shape) for code in codes]
        case FP4KeyCodec():
            codes, scale = _quantize_fp4_key(codec, x, dim)
            decode = numbers.decode_ue8m0 if codec.power_of_two else numbers.decode_e4m3
            shape = (*x.shape[:-1], x.shape[-1] // len(codes))
            parts = [(_decode_e2m1(code) * decode(scale)[:, None]).reshape(shape) for code in codes]
        case _:
            raise NotImplementedError(
                f"no kernel rounds {type(codec).__name__}; pass backend='reference'"
            )
    return join_neighbours(parts)


def hadamard_rotate(x: jax.Array, dim: int) -> list[jax.Array]:
    """`numbers.hadamard_rotate` of the first `dim` lanes of f32[..., width], others being zeros.

    Returns:
      Neighbours apart, as by `split_neighbours`. A thread holds them: the first butterflies need no
      other one, nor does most of what a group's scale and a word's codes come from.
    """
    num_parts = _NEIGHBOURS if dim >= _WORD_CODES else 1
    # First the butterflies of lanes that a thread holds, then those of lanes further apart.
    parts, half = split_neighbours(x, num_parts), 1
    while half < num_parts:
        parts = [
            parts[i - half] - part if i & half else part + parts[i + half]
            for i, part in enumerate(parts)
        ]
        half *= 2
    while half < dim:
        parts = [_butterfly(part, half // num_parts) for part in parts]
        half *= 2
    return [part * np.float32(dim**-0.5) for part in parts]


def _butterfly(x: jax.Array, half: int) -> jax.Array:
    """Sums and differences of lanes of f32[..., n] that lie `half` apart."""
    pairs = x.reshape(-1, 2, half)
    second = jax.lax.broadcasted_iota(jnp.int32, pairs.shape, 1) == 1
    # Not -pairs: Pallas negates as 0 - x for Triton, and of a zero that is 0.
    return (_partners(pairs) + pairs * jnp.where(second, -1.0, 1.0)).reshape(x.shape)


def _partners(pairs: jax.Array) -> jax.Array:
    """f32[n, 2, m], each two in the other's place: the sum of their bits, less their own."""
    bits = jax.lax.bitcast_convert_type(pairs, jnp.uint32)
    # Sums of integers wrap and are exact; those of floats would round.
    others = jnp.sum(bits, axis=1, dtype=jnp.uint32)[:, None] - bits
    return jax.lax.bitcast_convert_type(others, jnp.float32)


def _encode_grouped(
    codec: GroupedFP8Codec, x: jax.Array, nope_dim: int, rope_dim: int
) -> dict[str, Lanes]:
    # Entries are encoded from bf16, as the reference has them.
    x = round_to_dtype(x, jnp.bfloat16)
    nope = jnp.where(jnp.arange(x.shape[0]) < nope_dim, x, 0.0)
    # f32[width / group, group]; the rope dims are zeros here and count for no scale.
    groups = nope.reshape(-1, codec.group)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=1), _AMAX_FLOOR)
    scale = numbers.encode_ue8m0(amax * numbers.INV_448)
    code = triton.encode_e4m3(groups * numbers.invert_ue8m0(scale)[:, None])
    num_groups = pl.cdiv(nope_dim, codec.group)
    # A row has scales in multiples of eight: those of no group are zeros, as in the reference.
    stored = jnp.where(jnp.arange(scale.shape[0]) < num_groups, scale.astype(jnp.uint32), 0)
    return {
        "nope": Lanes(code.reshape(x.shape).astype(jnp.uint32), 0, nope_dim, bits=8),
        "rope": Lanes(x.astype(jnp.bfloat16), nope_dim, rope_dim),
        "scale": Lanes(stored, 0, pl.cdiv(num_groups, 8) * 8, bits=8),
    }


def _encode_whole(codec: WholeFP8Codec, x: jax.Array, dim: int) -> dict[str, Lanes]:
    groups = x.reshape(-1, codec.group)  # lanes from `dim` on are zeros
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=1), _AMAX_FLOOR)
    scale = numbers.encode_ue8m0(amax * numbers.INV_448)
    code = triton.encode_e4m3(groups * numbers.invert_ue8m0(scale)[:, None])
    return {
        "codes": Lanes(code.reshape(x.shape).astype(jnp.uint32), 0, dim, bits=8),
        "scale": Lanes(scale.astype(jnp.uint32), 0, pl.cdiv(dim, codec.group), bits=8),
    }


def _encode_scaled(x: jax.Array, nope_dim: int, rope_dim: int) -> dict[str, Lanes]:
    x = round_to_dtype(x, jnp.bfloat16)
    nope = jnp.where(jnp.arange(x.shape[0]) < nope_dim, x, 0.0)
    amax = jnp.maximum(jnp.max(jnp.abs(nope)), _AMAX_FLOOR)
    # By lanes, not as one scalar: the instruction takes arrays of one shape.
    inv_scale = triton.exact_quotient(
        jnp.broadcast_to(amax, x.shape), jnp.full(x.shape, 448.0, jnp.float32)
    )
    code = triton.encode_e4m3(triton.exact_quotient(nope, inv_scale))
    return {
        "nope": Lanes(code.astype(jnp.uint32), 0, nope_dim, bits=8),
        "rope": Lanes(x.astype(jnp.bfloat16), nope_dim, rope_dim),
        "inv_scale": Lanes(jnp.max(inv_scale), 0, 1),
    }


def _encode_fp8_key(x: jax.Array, dim: int) -> dict[str, Lanes]:
    codes, scale = _quantize_fp8_key(x, dim)
    return {
        "codes": _pack_neighbours([code.astype(jnp.uint32) for code in codes], dim, bits=8),
        "scale": Lanes(numbers.decode_ue8m0(scale), 0, 1),
    }


def _quantize_fp8_key(x: jax.Array, dim: int) -> tuple[list[jax.Array], jax.Array]:
    """f32[..., width] -> E4M3 codes u8[..., width / n] of n neighbours, and scales u8[...]."""
    # The rotated key is rounded before its scale is taken, as in the reference.
    parts = [round_to_dtype(part, jnp.bfloat16) for part in hadamard_rotate(x, dim)]
    largest = functools.reduce(jnp.maximum, [jnp.abs(part) for part in parts])
    amax = jnp.maximum(jnp.max(largest, axis=-1), _AMAX_FLOOR)
    scale = numbers.encode_ue8m0(amax * numbers.INV_448)
    # A factor for each lane of a part, whose neighbours have the same.
    inverse = beside(numbers.invert_ue8m0(scale), largest.shape)
    return [triton.encode_e4m3(part * inverse) for part in parts], scale


def _encode_fp4_key(codec: FP4KeyCodec, x: jax.Array, dim: int) -> dict[str, Lanes]:
    codes, scale = _quantize_fp4_key(codec, x, dim)
    packed = _pack_neighbours([code.reshape(-1).astype(jnp.uint32) for code in codes], dim, bits=4)
    if codec.interleaves_signs(dim):  # of eight codes to a word
        # Eight codes a word first, then the order of their signs, which are defined on words.
        words = pack(packed.values, packed.bits, 32 // packed.bits)
        packed = Lanes(numbers.interleave_signs(words), 0, dim // 8)
    return {
        "codes": packed,
        "scale": Lanes(scale.astype(jnp.uint32), 0, pl.cdiv(dim, codec.group), bits=8),
    }


def _quantize_fp4_key(
    codec: FP4KeyCodec, x: jax.Array, dim: int
) -> tuple[list[jax.Array], jax.Array]:
    """f32[..., width] -> E2M1 codes u8[g, group / n] of n neighbours of groups; scales u8[g]."""
    if codec.rotated:
        parts = [round_to_dtype(part, jnp.bfloat16) for part in hadamard_rotate(x, dim)]
    else:
        parts = split_neighbours(x, _NEIGHBOURS if dim % _WORD_CODES == 0 else 1)
    parts = [part.reshape(-1, codec.group // len(parts)) for part in parts]
    largest = functools.reduce(jnp.maximum, [jnp.abs(part) for part in parts])
    amax = jnp.max(largest, axis=1)
    if codec.power_of_two:
        scale = numbers.encode_ue8m0(jnp.maximum(amax, np.float32(6 * 2.0**-126)) * numbers.INV_6)
        inverse = numbers.invert_ue8m0(scale)[:, None]
        # Scales are powers of two here, and products with their inverses exact.
        scaled = [part * inverse for part in parts]
    else:
        # E4M3 scales are quotients, and no power of two: `/` may be off in the last bit here.
        sixth = triton.exact_quotient(amax, jnp.full(amax.shape, 6.0, jnp.float32))
        scale = triton.encode_e4m3(jnp.maximum(sixth, np.float32(2.0**-9)))
        divisor = jnp.broadcast_to(numbers.decode_e4m3(scale)[:, None], largest.shape)
        scaled = [triton.exact_quotient(part, divisor) for part in parts]
    return [numbers.encode_e2m1(part) for part in scaled], scale


def _pack_neighbours(codes: list[jax.Array], dim: int, *, bits: int) -> Lanes:
    """Codes u32[width / n] of n neighbours as codes of n times the bits."""
    shifted = [code << np.uint32(bits * i) for i, code in enumerate(codes)]
    return Lanes(functools.reduce(jnp.bitwise_or, shifted), 0, dim // len(codes), bits * len(codes))


def _decode_e2m1(code: jax.Array) -> jax.Array:
    """`numbers.decode_e2m1` without a table: the three low bits begin an f32 whose bias is 126.

    But for codes 0 and 1, which are subnormal: 0 and 0.5, the latter being that bias alone.
    """
    wide = code.astype(jnp.uint32)
    magnitude, half = wide & 7, np.uint32(126 << 23)
    bits = jnp.where(magnitude < 2, magnitude * half, (magnitude << 22) + half)
    return jax.lax.bitcast_convert_type(bits | (wide >> 3 << 31), jnp.float32)
