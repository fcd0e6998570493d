"""PageMemory: rows of the pools as pages of the host's memory, and back.

    devices u8[n, m] ── one row each ──> pinned memory of the host, where the device has such
    pages ──> devices, one array u8[n, m]

Both are for threads: they wait for the copies, whose memory JAX makes and frees. The devices
compute checksums on both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax import compat
from dsv4_jax.cache.row_sums import as_number, row_sums
from dsv4_jax.mesh import find_mesh

RUN_SIZES = (1, 4, 16, 64)
"""Rows of one copy; each is a program of each kind, and other numbers take the next one. 64 of
V4-Flash's blocks are 29 MB, at which a copy over PCIe has its full speed."""

MOST_RUN_BYTES = 2**25
"""No copy is of more, but for one of a single row."""

PINNED = "pinned_host"


class Filled(NamedTuple):
    """A row on the host: u8[m] in memory of some kind, and its checksum."""

    data: Any
    checksum: int


def run_sizes(row_bytes: int) -> tuple[int, ...]:
    """Sizes of the copies of rows of so many bytes."""
    return tuple(size for size in RUN_SIZES if size == 1 or size * row_bytes <= MOST_RUN_BYTES)


def padded_rows(rows: np.ndarray) -> np.ndarray:
    """Rows i32[n] and, up to the next size of a copy, -1."""
    padded = np.full(_padded(len(rows)), -1, np.int32)
    padded[: len(rows)] = rows
    return padded


def _padded(count: int) -> int:
    return next(size for size in RUN_SIZES if size >= count)


class PageMemory:
    """Where pages of an engine's pools lie.

    Attributes:
      kind: of the memory, as JAX calls it; None is that of NumPy's arrays.
    """

    def __init__(self, pools: Any) -> None:
        """For pools, whose devices are all in this process."""
        self._mesh = find_mesh(pools)
        leaf = jax.tree.leaves(pools)[0]
        self._device = min(leaf.devices(), key=lambda device: device.id)
        kinds = {memory.kind for memory in self._device.addressable_memories()}
        self.kind = PINNED if PINNED in kinds else None

    def to_host(self, packed: jax.Array, count: int) -> list[Filled]:
        """The first `count` rows of u8[n, m]; waits until they have come.

        Raises:
          Exception: what the device raised, or the host, which has no memory left.
        """
        rows, sums = _split(self._of_one_device(packed))
        numbers = np.asarray(sums)
        kept: Sequence[Any] = rows[:count]
        if self.kind is None:
            kept = [np.asarray(row) for row in kept]
        else:
            where = SingleDeviceSharding(self._device, memory_kind=self.kind)
            kept = jax.block_until_ready(jax.device_put(list(kept), where))
        return [Filled(row, as_number(each)) for row, each in zip(kept, numbers, strict=False)]

    def to_devices(self, rows: Sequence[Any]) -> tuple[jax.Array, list[int]]:
        """Pages u8[m], or the host's arrays, as one array, and the checksums of what has come.

        It has as many rows as a copy; those behind the last page hold anything.
        """
        padded = [*rows, *[rows[-1]] * (_padded(len(rows)) - len(rows))]
        device = self._device
        there = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
        packed, sums = _join(jax.device_put(padded, there))
        if self._mesh is None:
            packed = compat.uncommitted(packed)
        else:
            packed = jax.device_put(packed, NamedSharding(self._mesh, P()))
        numbers = np.asarray(sums)
        jax.block_until_ready(packed)
        return packed, [as_number(each) for each in numbers[: len(rows)]]

    def _of_one_device(self, packed: jax.Array) -> jax.Array:
        if len(packed.devices()) > 1 and packed.sharding.is_fully_replicated:
            shards = packed.addressable_shards
            return next(one.data for one in shards if one.device == self._device)
        return packed if self._mesh is None else jax.device_put(packed, self._device)


@jax.jit
def _split(packed: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Rows of u8[n, m], each an array, and their checksums u32[n, 2]."""
    return list(packed), row_sums(packed)


@jax.jit
def _join(rows: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Rows u8[m] in one array, and their checksums u32[n, 2]."""
    packed = jnp.stack(rows)
    return packed, row_sums(packed)
