"""Definition of `gather_host_rows`: the host reads its own memory, when the program calls it."""

from __future__ import annotations

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

WORD_BYTES = 4


def gather_host_rows(
    rows: jax.Array, addresses: jax.Array, *, row_bytes: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """See `op.gather_host_rows`."""
    shapes = tuple(jax.ShapeDtypeStruct((*rows.shape, size), jnp.uint8) for size in row_bytes)
    read = functools.partial(_read, row_bytes=row_bytes)
    return jax.pure_callback(read, shapes, rows, addresses)


def _read(
    rows: jax.Array, addresses: jax.Array, *, row_bytes: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    numbers = np.asarray(rows)[..., None]  # i32[T, L, C, 1]
    halves = np.asarray(addresses)[:, :, None, None]  # i32[L, P, 1, 1, 2]
    found = []
    for plane, size in enumerate(row_bytes):
        low, high = np.moveaxis(halves[:, plane], -1, 0)  # i32[L, 1, 1]
        words = np.arange(pl.cdiv(size, WORD_BYTES))
        read = read_words(low, high, numbers, words, row_bytes=size)
        found.append(read.view(np.uint8).reshape(*numbers.shape[:-1], -1)[..., :size])
    return tuple(found)


def read_words(
    low: jax.Array | np.ndarray,
    high: jax.Array | np.ndarray,
    row: jax.Array | np.ndarray,
    word: jax.Array | np.ndarray,
    *,
    row_bytes: int,
) -> np.ndarray:
    """Words of rows in the memory of this process.

    Args:
      low: i32[...], of the address at which a plane begins, the low half.
      high: i32[...], the high half.
      row: i32[...], the row's number.
      word: i32[...], the number of a word of the row.
      row_bytes: of a row.

    Returns:
      i32[...], of the shape to which these are broadcast; zeros behind the end of a row.
    """
    halves = (np.asarray(half).astype(np.int32).view(np.uint32) for half in (low, high))
    low, high = (half.astype(np.int64) for half in halves)
    row, word = (np.asarray(number).astype(np.int64) for number in (row, word))
    at = (high << 32) + low + row * row_bytes + word * WORD_BYTES
    sizes = np.broadcast_to(np.minimum(row_bytes - word * WORD_BYTES, WORD_BYTES), at.shape)
    found = np.zeros((*at.shape, WORD_BYTES), np.uint8)
    for where, address in np.ndenumerate(at):
        size = int(sizes[where])
        found[where][:size] = np.frombuffer(ctypes.string_at(int(address), size), np.uint8)
    return found.view(np.int32)[..., 0]
