"""Checksums of rows of bytes: what the op `pack_rows` and the host compute alike.

A row's sum is 64 bits: no damage by accident gets past it, and it is no protection from who means
it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

FACTORS = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))
"""Odd, one for each half: a word's place times it is what the word is mixed with."""


def mix_bits[T: (jax.Array, np.ndarray)](values: T) -> T:
    """A bijection of u32 in which every bit depends on every other (MurmurHash3's last step)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        values = (values ^ (values >> shift)) * np.uint32(factor)
    return values ^ (values >> 16)


def row_sums(packed: jax.Array) -> jax.Array:
    """A checksum of each row.

    Args:
      packed: u8[n, m].

    Returns:
      u32[n, 2]: of the row's little-endian u32 words w_i, padded with zeros, the sums of
      mix(w_i ^ (i + 1) f), for two factors f.
    """
    count, width = packed.shape
    padded = jnp.pad(packed, ((0, 0), (0, -width % 4)))
    words = jax.lax.bitcast_convert_type(padded.reshape(count, padded.shape[1] // 4, 4), jnp.uint32)
    places = jnp.arange(1, words.shape[1] + 1, dtype=jnp.uint32)
    sums = [
        jnp.sum(mix_bits(words ^ (places * factor)[None]), axis=1, dtype=jnp.uint32)
        for factor in FACTORS
    ]
    return jnp.stack(sums, axis=1)
