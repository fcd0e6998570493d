"""Element types of the cache formats, bit for bit: E4M3, E2M1, UE8M0, and the Hadamard rotation.

Source: deepseek_v4.md section 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

E4M3_MAX = 448.0
# Products with these, not quotients, are what the released quantisers compute.
INV_448 = np.float32(1.0) / np.float32(448.0)
INV_6 = np.float32(1.0) / np.float32(6.0)
_E2M1_MAX_BITS = np.float32(6.0).view(np.uint32)
_E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)
"""Where `interleave_signs` puts the sign of each of eight codes."""


def encode_e4m3(x: jax.Array) -> jax.Array:
    """f32 -> u8, the E4M3 code: nearest, ties to even, saturating at 448.

    From x's bits, since XLA's own conversion rounds twice on a GPU and may be left out.
    """
    bits = jax.lax.bitcast_convert_type(jnp.clip(x, -E4M3_MAX, E4M3_MAX), jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    # 20 of 23 mantissa bits go; half an ulp more or, at ties to an even code, a bit less.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 codes are multiples of 2**-9: adding 2**14 leaves just those bits, nearest even.
    small = jax.lax.bitcast_convert_type(magnitude, jnp.float32)
    subnormal = jax.lax.bitcast_convert_type(small + np.float32(2.0**14), jnp.uint32) & 0xF
    code = jnp.where(magnitude < (127 - 6) << 23, subnormal, normal)
    code = jnp.where(jnp.isnan(x), 0x7F, code)
    return (code | (bits >> 31 << 7)).astype(jnp.uint8)


def decode_e4m3(code: jax.Array) -> jax.Array:
    """u8 -> f32."""
    return jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float32)


def encode_e2m1(x: jax.Array) -> jax.Array:
    """f32 -> u8, the E2M1 code: nearest, ties to the even code, saturating at 6; bit 3 is the sign.

    A negative value that rounds to zero is code 8. From x's bits; a NaN saturates too.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = jnp.minimum(bits & 0x7FFFFFFF, _E2M1_MAX_BITS)
    # 22 of 23 mantissa bits go; half an ulp more or, at ties to an even code, a bit less.
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - ((127 - 1) << 1)
    # Below 1 codes are multiples of 0.5: adding 2**22 leaves just those bits, nearest even.
    small = jax.lax.bitcast_convert_type(magnitude, jnp.float32)
    subnormal = jax.lax.bitcast_convert_type(small + np.float32(2.0**22), jnp.uint32) & 3
    code = jnp.where(magnitude < 127 << 23, subnormal, normal)
    return (code | (bits >> 31 << 3)).astype(jnp.uint8)


def decode_e2m1(code: jax.Array) -> jax.Array:
    """u8 in 0..15 -> f32."""
    values = jnp.concatenate([jnp.asarray(_E2M1_VALUES), -jnp.asarray(_E2M1_VALUES)])
    return values[code.astype(jnp.int32)]


def pack_nibbles(code: jax.Array) -> jax.Array:
    """u8[..., n] in 0..15 -> u8[..., ceil(n / 2)], the even index in the low nibble."""
    if code.shape[-1] % 2:
        code = _pad_last(code, 1)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """u8[..., n] -> u8[..., 2 * n] in 0..15."""
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def interleave_signs(words: jax.Array) -> jax.Array:
    """u32 -> u32, words of eight E2M1 codes, the first one lowest, whose signs change places.

    The sign of code j goes to bit 8 j + 7 and that of code 4 + j to bit 8 j + 3, for j in 0..3;
    magnitudes stay. A kernel looks up four magnitudes as the bytes of a word: one mask then gives
    their signs in bit 7 of each byte, of the upper four codes after a shift by 4.
    """
    moved = words & 0x77777777
    for code, bit in enumerate(SIGN_BITS):
        moved |= ((words >> (4 * code + 3)) & 1) << bit
    return moved


def restore_signs(words: jax.Array) -> jax.Array:
    """The inverse of `interleave_signs`."""
    restored = words & 0x77777777
    for code, bit in enumerate(SIGN_BITS):
        restored |= ((words >> bit) & 1) << (4 * code + 3)
    return restored


def encode_ue8m0(x: jax.Array) -> jax.Array:
    """f32 > 0 -> u8 b, the smallest power of two 2**(b - 127) that is at least x."""
    return ue8m0_exponent(x.astype(jnp.float32)).astype(jnp.uint8)


def ue8m0_exponent(x: jax.Array) -> jax.Array:
    """`encode_ue8m0` as i32, from x's bits: what is above a power of two carries."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) + 0x7FFFFF) >> 23


def decode_ue8m0(code: jax.Array) -> jax.Array:
    """u8 b in 1..254 -> f32 2**(b - 127)."""
    return jax.lax.bitcast_convert_type(code.astype(jnp.uint32) << 23, jnp.float32)


def invert_ue8m0(code: jax.Array) -> jax.Array:
    """u8 b in 1..253 -> f32 2**(127 - b): a product with it is the exact quotient by the scale."""
    return decode_ue8m0(254 - code)


def split_groups(x: jax.Array, size: int) -> jax.Array:
    """[..., n] -> [..., ceil(n / size), size]; a short last group is filled up with zeros."""
    padded = _pad_last(x, -x.shape[-1] % size)
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // size, size)


def join_groups(groups: jax.Array, length: int) -> jax.Array:
    """[..., g, size] -> [..., length], the inverse of `split_groups`."""
    *lead, num_groups, size = groups.shape
    return groups.reshape(*lead, num_groups * size)[..., :length]


def hadamard_rotate(x: jax.Array) -> jax.Array:
    """Multiplies the last axis by the normalised Hadamard matrix, in natural (Sylvester) order.

    Butterflies, not a matrix product: their rounding depends on the row alone, whatever the shape.

    Args:
      x: f32[..., n], n a power of two.

    Returns:
      f32[..., n].

    Raises:
      ValueError: n is not a power of two.
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(
            f"a Hadamard rotation needs a power of two, got a last axis of {n}; "
            "use a cache format whose index keys are not rotated ('f32' or 'bf16')"
        )
    y, half = x.astype(jnp.float32), 1
    while half < n:
        pairs = y.reshape(*x.shape[:-1], n // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return y * np.float32(n**-0.5)


def _pad_last(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)]) if count else x
