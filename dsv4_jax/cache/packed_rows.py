"""Slots, blocks and snapshots as bytes, on their way from the pools to the host and back.

A row is what all planes of all layers hold at one place of their second axis: a slot of
`ModelCache.state`, a block of `ModelCache.paged` or a place of a `SnapshotStore`. Its bytes lie one
plane after the other, in the order of the pools' leaves, layer after layer and without padding:

    row     plane 0: layer 0, layer 1, ..   plane 1: layer 0, ..   ..
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from dsv4_jax import checks
from pallas_kernels.common.addressing import drop_absent


def row_bytes(pools: object) -> int:
    """Bytes of one row of these pools, arrays or their shapes."""
    return sum(_plane_bytes(plane) for plane in jax.tree.leaves(pools))


@jax.jit
def pack_rows(pools: object, rows: jax.Array) -> jax.Array:
    """Some rows of pools, in one array.

    On a mesh rows are numbered through all devices, as the arrays' second axis is.

    Args:
      pools: planes [L, A, ...].
      rows: i32[n]; what -1 gives is arbitrary.

    Returns:
      u8[n, `row_bytes(pools)`].

    Raises:
      ValueError: `rows` is no such array.
    """
    checks.array("rows", rows, (None,))
    index, count = jnp.maximum(rows, 0), rows.shape[0]
    parts = [jnp.zeros((count, 0), jnp.uint8)]
    for plane in jax.tree.leaves(pools):
        taken = jnp.moveaxis(plane[:, index], 1, 0)
        bits = jax.lax.bitcast_convert_type(taken, jnp.uint8)
        parts.append(bits.reshape(count, _plane_bytes(plane)))
    return jnp.concatenate(parts, axis=1)


def unpack_rows[T](pools: T, rows: jax.Array | np.ndarray, packed: jax.Array | np.ndarray) -> T:
    """Puts rows that `pack_rows` took, of pools with the same planes, where `rows` says.

    The old pools are gone.

    Args:
      pools: planes [L, A, ...].
      rows: i32[n], no row twice; -1 writes nothing.
      packed: u8[n, `row_bytes(pools)`].

    Raises:
      ValueError: an array has another shape or dtype.
    """
    checks.array("rows", rows, (None,))
    checks.array("packed", packed, (rows.shape[0], row_bytes(pools)), "u")
    leaves, tree = jax.tree.flatten(pools)
    if not leaves:
        return pools
    program = _unpacking(tuple(leaf.sharding for leaf in leaves))
    return jax.tree.unflatten(tree, program(leaves, rows, packed))


@functools.lru_cache(maxsize=64)
def _unpacking(where: tuple[Sharding, ...]) -> Callable[..., list[jax.Array]]:
    """A program that leaves every plane on the devices where it lay."""

    def unpack(planes: list[jax.Array], rows: jax.Array, packed: jax.Array) -> list[jax.Array]:
        found, start = [], 0
        for plane in planes:
            size, width = _plane_bytes(plane), plane.dtype.itemsize
            bits = packed[:, start : start + size]
            shape = (rows.shape[0], plane.shape[0], *plane.shape[2:])
            bits = bits.reshape(shape if width == 1 else (*shape, width))
            values = jnp.moveaxis(jax.lax.bitcast_convert_type(bits, plane.dtype), 0, 1)
            target = drop_absent(rows, plane.shape[1])
            found.append(plane.at[:, target].set(values, mode="drop"))
            start += size
        return found

    if all(isinstance(one, SingleDeviceSharding) for one in where):
        # Named, it would commit the planes to the device, and each program that takes them would
        # be compiled again for that.
        return jax.jit(unpack, donate_argnums=0)
    return jax.jit(unpack, donate_argnums=0, out_shardings=list(where))


def _plane_bytes(plane: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of a plane at one place of its second axis."""
    sizes = (plane.shape[0], *plane.shape[2:])
    return math.prod(sizes) * np.dtype(plane.dtype).itemsize
