"""Rows of the tables as `hashes` finds them, in programs whose whole numbers have 32 bits.

A number of 64 bits is two of u32, `High` and `Low`. The remainder by a prime below 2**31 is that of
long division, some bits at a time, as many as leave every step within 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.config.engram import EngramConfig
from dsv4_jax.engram.hashes import multipliers

_HALF = 16
_MASK = np.uint32(0xFFFF)
_DIGITS = 16, 8, 4, 2, 1
"""Bits that a step of a division may take; a word is a whole number of steps."""


class Wide(NamedTuple):
    """Whole numbers of 64 bits.

    Attributes:
      high: u32[...], the upper halves.
      low: u32[...], the lower ones.
    """

    high: jax.Array
    low: jax.Array


def hash_ngrams(config: EngramConfig, back: jax.Array) -> jax.Array:
    """Rows of each table of normalised ids i32[..., max_ngram]: i32[..., L, columns].

    The same as `hashes.hash_ngrams` gives. A table has fewer than 2**31 rows.
    """
    ids = back[..., None, :].astype(jnp.uint32)  # [..., 1, max_ngram]

    def wide(values: np.ndarray) -> np.ndarray:
        """Numbers of [L, n] beside those of every token."""
        return np.expand_dims(values, tuple(range(ids.ndim - 2)))

    product = _multiply(ids, wide(multipliers(config).astype(np.uint64)))  # [..., L, max_ngram]
    mixed = [Wide(product.high[..., 0], product.low[..., 0])]
    for place in range(1, config.max_ngram):
        high = mixed[-1].high ^ product.high[..., place]
        mixed.append(Wide(high, mixed[-1].low ^ product.low[..., place]))
    # Of 2 tokens, of 3 and so on, each with as many primes as there are heads.
    spread = [
        jnp.repeat(jnp.stack(halves, axis=-1), config.num_heads, axis=-1)
        for halves in zip(*mixed[1:], strict=True)
    ]
    primes = np.array(config.primes, np.int64)  # [L, columns]
    offsets = np.cumsum(primes, axis=-1) - primes
    bits = _digit_bits(int(primes.max()))
    found = _remainder(Wide(*spread), wide(primes.astype(np.uint32)), bits)
    return found.astype(jnp.int32) + wide(offsets.astype(np.int32))


def _multiply(x: jax.Array, factors: np.ndarray) -> Wide:
    """u32[...] times u64[...], without what is beyond 64 bits."""
    low = (factors & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (factors >> np.uint64(32)).astype(np.uint32)
    a, b = x & _MASK, x >> _HALF
    c, d = low & _MASK, low >> np.uint32(_HALF)
    middle = ((a * c) >> _HALF) + ((a * d) & _MASK) + ((b * c) & _MASK)
    upper = b * d + ((a * d) >> _HALF) + ((b * c) >> _HALF) + (middle >> _HALF)
    return Wide(upper + x * high, x * low)


def _digit_bits(most: int) -> int:
    """The most bits by which a remainder of numbers up to `most` can be shifted within 32."""
    return next(bits for bits in _DIGITS if bits <= 32 - most.bit_length())


def _remainder(number: Wide, divisor: np.ndarray, bits: int) -> jax.Array:
    """u32[...] of numbers and of divisors u32[...], of so many bits at a time."""
    rest = jnp.zeros_like(number.low)
    for word in number:
        for shift in range(32 - bits, -1, -bits):
            digit = (word >> shift) & jnp.uint32((1 << bits) - 1)
            rest = ((rest << bits) | digit) % divisor
    return rest
