"""Rows of pools that each device of a mesh packs for itself, and takes back.

`packed_rows` has rows that are numbered through all devices, of which all get a copy. Here nothing
leaves a device: each packs rows of its own, so that a process keeps what its devices hold. Arrays
have the parts of all devices one after the other, in the order of the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from dsv4_jax.mesh import BY_BLOCK, BY_DEVICE, BY_SLOT, DATA, mesh_sizes


def pack_own_rows(
    pools: object, rows: jax.Array, mesh: Mesh, *, is_split: bool
) -> tuple[jax.Array, jax.Array]:
    """Some rows of each device, and their checksums.

    Args:
      pools: planes [L, A, ...] on the mesh.
      rows: i32[d n] over d devices, by their numbers on each; what -1 gives is zeros.
      mesh: all devices.
      is_split: A is over all devices, and else over data shards.

    Returns:
      u8[d n, bytes of a row], n of each device, and u32[d n, 2], as `row_sums` has them.
    """
    leaves = jax.tree.leaves(pools)
    return _packing(mesh, is_split)(leaves, rows)


def unpack_own_rows[T](
    pools: T, rows: jax.Array, packed: jax.Array, crosses: jax.Array, mesh: Mesh, *, is_split: bool
) -> T:
    """Puts rows that `pack_own_rows` gave where each device wants them; the old pools are gone.

    Args:
      pools: planes [L, A, ...] on the mesh.
      rows: i32[d n] over d devices, no row of a device twice; -1 writes nothing.
      packed: u8[d n, bytes of a row].
      crosses: bool[], the same everywhere: rows come from other data shards, and the devices of one
        alone have bytes that are no zeros.
      mesh: all devices.
      is_split: A is over all devices, and else over data shards.
    """
    leaves, tree = jax.tree.flatten(pools)
    where = tuple(leaf.sharding for leaf in leaves)
    found = _unpacking(mesh, where, is_split)(leaves, rows, packed, crosses)
    return jax.tree.unflatten(tree, found)


@functools.lru_cache(maxsize=16)
def _packing(mesh: Mesh, is_split: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    specs = (BY_BLOCK if is_split else BY_SLOT, BY_DEVICE)

    on_devices = jax.shard_map(
        pk.pack_rows,
        mesh=mesh,
        in_specs=specs,
        out_specs=(BY_DEVICE, BY_DEVICE),
        check_vma=False,
    )
    return jax.jit(on_devices, out_shardings=NamedSharding(mesh, BY_DEVICE))


@functools.lru_cache(maxsize=16)
def _unpacking(mesh: Mesh, where: tuple[Sharding, ...], is_split: bool) -> Callable[..., Any]:
    """A program that leaves every plane on the devices where it lay."""

    def unpack(
        planes: list[jax.Array], rows: jax.Array, packed: jax.Array, crosses: jax.Array
    ) -> list[jax.Array]:
        if mesh_sizes(mesh)[0] > 1:
            packed = jax.lax.cond(
                crosses, lambda one: jax.lax.psum(one, DATA), lambda one: one, packed
            )
        return pk.unpack_rows(planes, rows, packed)

    planes = BY_BLOCK if is_split else BY_SLOT
    on_devices = jax.shard_map(
        unpack,
        mesh=mesh,
        in_specs=(planes, BY_DEVICE, BY_DEVICE, P()),
        out_specs=planes,
        check_vma=False,
    )
    return jax.jit(on_devices, donate_argnums=0, out_shardings=list(where))
