"""Definition of `pack_rows`, `unpack_rows` and `sum_rows`: rows of planes as bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import checksums
from pallas_kernels.common.addressing import drop_absent


def pack_rows(planes: Sequence[jax.Array], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `op.pack_rows`."""
    count = rows.shape[0]
    parts = [jnp.zeros((count, 0), jnp.uint8)]
    for plane in planes:
        is_there = (rows >= 0) & (rows < plane.shape[1])  # bool[n]
        # Row 0 where there is none, so that -1 does not read the last one. [n, L, ...]
        taken = jnp.moveaxis(plane[:, jnp.where(is_there, rows, 0)], 1, 0)
        bits = jax.lax.bitcast_convert_type(taken, jnp.uint8).reshape(count, plane_bytes(plane))
        parts.append(jnp.where(is_there[:, None], bits, 0))  # u8[n, bytes of the plane]
    packed = jnp.concatenate(parts, axis=1)  # u8[n, bytes of all]
    return packed, sum_rows(packed)


def unpack_rows(planes: Sequence[jax.Array], rows: jax.Array, packed: jax.Array) -> list[jax.Array]:
    """See `op.unpack_rows`."""
    found, start = [], 0
    for plane in planes:
        size, width = plane_bytes(plane), plane.dtype.itemsize
        bits = packed[:, start : start + size]  # u8[n, bytes of the plane]
        shape = (rows.shape[0], plane.shape[0], *plane.shape[2:])  # [n, L, ...]
        # Bytes of an element in an axis of their own, which the cast takes away.
        bits = bits.reshape(shape if width == 1 else (*shape, width))
        values = jnp.moveaxis(jax.lax.bitcast_convert_type(bits, plane.dtype), 0, 1)  # [L, n, ...]
        target = drop_absent(rows, plane.shape[1])  # i32[n], beyond the plane for none
        found.append(plane.at[:, target].set(values, mode="drop"))
        start += size
    return found


def sum_rows(packed: jax.Array) -> jax.Array:
    """See `op.sum_rows`."""
    return checksums.row_sums(packed)


def plane_bytes(plane: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of a plane [L, A, ...] at one place of its second axis."""
    sizes = (plane.shape[0], *plane.shape[2:])
    return math.prod(sizes) * np.dtype(plane.dtype).itemsize
