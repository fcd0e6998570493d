"""Checksums of packed rows, which travel with them: to the host, to a file, and back.

The devices compute them where they read the bytes anyway, so that the host never has to. A row's
sum is 64 bits: no damage by accident gets past it, and it is no protection from who means it.
"""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels import sum_rows
from pallas_kernels.common.checksums import FACTORS, mix_bits


def row_sums(packed: jax.Array) -> jax.Array:
    """A checksum of each row, as `pallas_kernels.sum_rows` has it.

    Args:
      packed: u8[n, m].

    Returns:
      u32[n, 2].
    """
    return sum_rows(packed)


def sum_of_row(data: np.ndarray) -> int:
    """The same of u8[m], on the host, as one number: the first half is the lower one."""
    padded = np.zeros(-(-len(data) // 4) * 4, np.uint8)
    padded[: len(data)] = data
    words = padded.view("<u4").astype(np.uint32)
    places = np.arange(1, len(words) + 1, dtype=np.uint32)
    return as_number(
        np.array([np.sum(mix_bits(words ^ (places * one)), dtype=np.uint32) for one in FACTORS])
    )


def as_number(halves: np.ndarray) -> int:
    """A row of `row_sums` as one number."""
    return int(halves[0]) | int(halves[1]) << 32


def as_halves(number: int) -> tuple[int, int]:
    """The reverse of `as_number`."""
    return number & 0xFFFFFFFF, number >> 32
