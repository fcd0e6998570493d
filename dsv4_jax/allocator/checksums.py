"""What a cache's arrays hold, reduced to one number and one flag per row; for `verify_cache`.

On a mesh every device scans its own part, and results are those of all devices one after the other
on the first axis, so that what should be equal over `model` can be compared.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.schema import FamilyKind
from dsv4_jax.cache.snapshots import SnapshotStore
from dsv4_jax.mesh import BY_DEVICE, on_mesh
from pallas_kernels.common.checksums import mix_bits


@flax.struct.dataclass
class RowScan:
    """One family of rows, all layers together.

    Attributes:
      checksums: u32[A, R], of block and offset, or of slot and row.
      is_poison: bool[A, R], some layer has all bits of the row set, as `poison` leaves them.
      kind: of the family.
    """

    checksums: jax.Array
    is_poison: jax.Array
    kind: FamilyKind = flax.struct.field(pytree_node=False)


@jax.jit
@on_mesh((BY_DEVICE, BY_DEVICE))
def read_tables(cache: ModelCache) -> tuple[jax.Array, jax.Array]:
    """Lengths i32[NS] and block tables i32[NS, LB]."""
    return cache.length_tokens, cache.block_table


@jax.jit
@on_mesh(BY_DEVICE)
def scan_rows(cache: ModelCache) -> dict[str, RowScan]:
    """Every family of a cache: blocks u32[NB, EB] and rings u32[NS, rows] by name.

    A running HCA pool is one row. Of a CSA compressor's state, the halves of a row that belong to
    the token's own window and to the next are two families, since they live differently long.
    """
    scans: dict[str, RowScan] = {}
    for attn, pool in cache.paged.items():
        scans[f"{attn}.entries"] = _scan(FamilyKind.ENTRIES, list(pool.entries.values()))
        if pool.index_keys is not None:
            keys = list(pool.index_keys.values())
            scans[f"{attn}.index_keys"] = _scan(FamilyKind.ENTRIES, keys)
    for attn, pool in cache.state.items():
        if pool.window:
            scans[f"{attn}.window"] = _scan(FamilyKind.WINDOW, list(pool.window.values()))
        if pool.pending is not None:
            scans[f"{attn}.pending"] = _scan(FamilyKind.STATE, list(pool.pending.values()))
        for name in ("tail", "index_tail"):
            planes = getattr(pool, name)
            if planes is not None:
                half = jax.tree.leaves(planes)[0].shape[-1] // 2
                previous = [plane[..., :half] for plane in planes.values()]
                own = [plane[..., half:] for plane in planes.values()]
                scans[f"{attn}.{name}.previous"] = _scan(FamilyKind.STATE, previous)
                scans[f"{attn}.{name}.own"] = _scan(FamilyKind.STATE, own)
        if pool.running is not None:
            scans[f"{attn}.running"] = _scan(FamilyKind.STATE, [pool.running[:, :, None]])
    return scans


@jax.jit
@on_mesh(BY_DEVICE)
def scan_snapshots(store: SnapshotStore) -> dict[str, RowScan]:
    """Every family of a snapshot store, u32[n, rows] by name; none of a store without places."""
    if not store.num_snapshots:
        return {}
    scans = {
        f"{attn}.window": _scan(FamilyKind.WINDOW, list(planes.values()))
        for attn, planes in store.window.items()
    }
    for name in ("tail", "index_tail"):
        planes = getattr(store, name)
        if planes is not None:
            scans[f"csa.{name}"] = _scan(FamilyKind.STATE, list(planes.values()))
    return scans


def _scan(kind: FamilyKind, planes: list[jax.Array]) -> RowScan:
    """Planes [L, A, R, ...] of one family."""
    total = jnp.zeros(planes[0].shape[1:3], jnp.uint32)
    ones = jnp.ones(planes[0].shape[:3], bool)
    for number, plane in enumerate(planes):
        bits = _bits(plane)
        layers, width = bits.shape[0], bits.shape[3]
        # Every value is mixed with its place, and the bits of both among each other: in a plain
        # weighted sum two flipped signs would cancel.
        index = np.arange(layers * width, dtype=np.uint32).reshape(layers, 1, 1, width)
        salt = (index + np.uint32(1 + 7919 * number)) * np.uint32(2654435761)
        total += jnp.sum(mix_bits(bits ^ jnp.asarray(salt)), axis=(0, 3), dtype=jnp.uint32)
        full = np.uint32(2 ** (8 * plane.dtype.itemsize) - 1)
        ones &= jnp.all(bits == full, axis=3)
    return RowScan(total, jnp.any(ones, axis=0), kind)


def _bits(plane: jax.Array) -> jax.Array:
    """[L, A, R, ...] of any dtype -> u32[L, A, R, n]."""
    width = np.dtype(plane.dtype).itemsize
    bits = jax.lax.bitcast_convert_type(plane, np.dtype(f"u{width}"))
    return bits.astype(jnp.uint32).reshape(*plane.shape[:3], -1)
