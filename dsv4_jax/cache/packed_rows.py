"""Slots, blocks and snapshots as bytes, on their way from the pools to the host and back.

A row is what all planes of all layers hold at one place of their second axis: a slot of
`ModelCache.state`, a block of `ModelCache.paged` or a place of a `SnapshotStore`. Its bytes lie one
plane after the other, in the order of the pools' leaves, layer after layer and without padding:

    row     plane 0: layer 0, layer 1, ..   plane 1: layer 0, ..   ..

On a mesh each device moves the rows that it has. Of packed rows every device has all: what the
others lack is zeros, and a sum over the devices joins it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from dsv4_jax import checks
from dsv4_jax.cache.row_sums import row_sums
from dsv4_jax.mesh import place_on
from pallas_kernels.pack_rows.reference import plane_bytes


def row_bytes(pools: object) -> int:
    """Bytes of one row of these pools, arrays or their shapes."""
    return sum(plane_bytes(plane) for plane in jax.tree.leaves(pools))


def pack_rows(pools: object, rows: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Some rows of pools, in one array, and their checksums.

    On a mesh rows are numbered through all devices, as the arrays' second axis is.

    Args:
      pools: planes [L, A, ...].
      rows: i32[n]; what -1 gives is arbitrary.

    Returns:
      u8[n, `row_bytes(pools)`], and u32[n, 2], as `row_sums` has them.

    Raises:
      ValueError: `rows` is no such array.
    """
    checks.array("rows", rows, (None,))
    leaves = jax.tree.leaves(pools)
    if not leaves:
        nothing = jnp.zeros((rows.shape[0], 0), jnp.uint8)
        return nothing, row_sums(nothing)
    return _packing(tuple(leaf.sharding for leaf in leaves))(leaves, rows)


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
def _packing(where: tuple[Sharding, ...]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A program that gives rows of planes that lie so, and their checksums, to every device."""
    named = [one for one in where if isinstance(one, NamedSharding)]
    if not named:
        return jax.jit(pk.pack_rows)
    axes = _row_axes(named)

    def pack(planes: list[jax.Array], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        own, is_own = _own_rows(rows, planes[0].shape[1], axes)
        packed, sums = pk.pack_rows(planes, own)
        # Zeros have a checksum too, and only one device gives that of a row.
        sums = jnp.where(is_own[:, None], sums, 0)
        return jax.lax.psum((packed, sums), axes) if axes else (packed, sums)

    on_devices = jax.shard_map(
        pack,
        mesh=named[0].mesh,
        in_specs=([one.spec for one in named], P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    return jax.jit(on_devices)


@functools.lru_cache(maxsize=64)
def _unpacking(where: tuple[Sharding, ...]) -> Callable[..., list[jax.Array]]:
    """A program that leaves every plane on the devices where it lay."""
    named = [one for one in where if isinstance(one, NamedSharding)]
    if not named:
        # Named, the device would be one to which planes are committed, and each program that takes
        # them would be compiled again for that.
        return jax.jit(pk.unpack_rows, donate_argnums=0)
    axes = _row_axes(named)

    def unpack(planes: list[jax.Array], rows: jax.Array, packed: jax.Array) -> list[jax.Array]:
        own, _ = _own_rows(rows, planes[0].shape[1], axes)
        return pk.unpack_rows(planes, own, packed)

    specs = [one.spec for one in named]
    on_devices = jax.shard_map(
        unpack, mesh=named[0].mesh, in_specs=(specs, P(), P()), out_specs=specs, check_vma=False
    )
    return jax.jit(on_devices, donate_argnums=0, out_shardings=named)


def _row_axes(where: Sequence[NamedSharding]) -> tuple[str, ...]:
    """The axes of the mesh over which the planes' second axis is split, the same for all."""
    found = {_axes_of(one.spec) for one in where}
    assert len(found) == 1, f"planes of one pool lie in different ways: {found}"
    return found.pop()


def _axes_of(spec: P) -> tuple[str, ...]:
    first, axes, *others = *spec, None, None
    assert not any((first, *others)), f"a pool is split over its rows alone, got {spec}"
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _own_rows(rows: jax.Array, count: int, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Rows as a device numbers them that has `count`, -1 for others, and bool[n], which it has.

    A row that no device has is one of the first.
    """
    is_own = jnp.maximum(rows, 0) // count == place_on(*axes)
    return jnp.where(is_own & (rows >= 0), rows - place_on(*axes) * count, -1), is_own
