"""PageMemory: rows of the pools in arrays of the host's memory, and back.

    devices u8[n, m] ── as they are, or in parts ──> pinned memory of the host, where the device has
    such arrays ──> devices, one array u8[n, m]

Both are for threads: they wait for the copies, whose memory JAX makes and frees. The devices
compute checksums on both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax import compat
from dsv4_jax.cache.row_sums import row_sums
from dsv4_jax.mesh import find_mesh

RUN_SIZES = (1, 4, 16, 64)
"""Rows of one copy; each is a program of each kind, and other numbers take the next one. 64 of
V4-Flash's blocks are 29 MB, at which a copy over PCIe has its full speed."""

MOST_RUN_BYTES = 2**25
"""No copy is of more, but for one of a single row."""

PINNED = "pinned_host"


def run_sizes(row_bytes: int) -> tuple[int, ...]:
    """Sizes of the copies of rows of so many bytes."""
    return tuple(size for size in RUN_SIZES if size == 1 or size * row_bytes <= MOST_RUN_BYTES)


def padded_rows(rows: np.ndarray) -> np.ndarray:
    """Rows i32[n] and, up to the next size of a copy, -1."""
    found = np.full(padded(len(rows)), -1, np.int32)
    found[: len(rows)] = rows
    return found


def parts_of(count: int, row_bytes: int) -> Iterator[int]:
    """Sizes of copies that are exactly so many rows of so many bytes, the largest first."""
    for size in reversed(run_sizes(row_bytes)):
        yield from [size] * (count // size)
        count %= size


def padded(count: int) -> int:
    """Rows of the smallest copy that holds so many."""
    return next(size for size in RUN_SIZES if size >= count)


class DeviceMemory:
    """Ways between the memory of one device and the host's.

    Attributes:
      device: which one.
      kind: of the host's memory, as JAX calls it; None is that of NumPy's arrays.
    """

    def __init__(self, device: Any) -> None:
        """Of one device."""
        self.device = device
        kinds = {memory.kind for memory in device.addressable_memories()}
        self.kind = PINNED if PINNED in kinds else None

    def to_host(
        self, packed: jax.Array, sums: jax.Array, sizes: Sequence[int]
    ) -> tuple[list[Any], np.ndarray]:
        """The first rows of u8[n, m] in arrays of so many each; waits until they have come.

        Args:
          packed: rows, on this device alone.
          sums: u32[n, 2], their checksums.
          sizes: of the parts, each one of `RUN_SIZES`.

        Returns:
          The parts, and the checksums of all rows.

        Raises:
          Exception: what the device raised, or the host, which has no memory left.
        """
        parts, start = [], 0
        for size in sizes:
            whole = size == packed.shape[0]
            parts.append(packed if whole else _part(packed, np.int32(start), size))
            start += size
        if self.kind is None:
            return [np.asarray(part) for part in parts], np.asarray(sums)
        where = SingleDeviceSharding(self.device, memory_kind=self.kind)
        return jax.block_until_ready(jax.device_put(parts, where)), np.asarray(sums)

    def to_device(self, parts: Sequence[Any], rows: int) -> tuple[jax.Array, jax.Array]:
        """Arrays u8[n, m] of the host, one after the other; waits until they have come.

        Args:
          parts: of as many rows each as one of `RUN_SIZES`.
          rows: how many come in all, one of `RUN_SIZES`; those behind the last part are zeros.

        Returns:
          u8[rows, m] and u32[rows, 2], what checksums have come.
        """
        # What is launched on copies that are under way makes the steps behind it wait for them.
        sent = jax.block_until_ready(jax.device_put(list(parts), self._there))
        packed = sent[0]
        if packed.shape[0] != rows:
            packed, start = self.zeros(rows, packed.shape[1]), 0
            for part in sent:
                packed = _place(packed, part, np.int32(start))
                start += part.shape[0]
        return packed, _sums(packed)

    def zeros(self, rows: int, width: int) -> jax.Array:
        """u8[rows, width] on the device."""
        return _room(self._there, rows, width)()

    @property
    def _there(self) -> SingleDeviceSharding:
        device = self.device
        return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


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
        self._memory = DeviceMemory(self._device)
        self.kind = self._memory.kind

    def to_host(
        self, packed: jax.Array, sums: jax.Array, sizes: Sequence[int]
    ) -> tuple[list[Any], np.ndarray]:
        """As `DeviceMemory.to_host`, of rows that lie on any of the devices."""
        return self._memory.to_host(self._of_one_device(packed), sums, sizes)

    def to_devices(self, parts: Sequence[Any]) -> tuple[jax.Array, np.ndarray]:
        """Arrays u8[n, m] of the host, one after the other, and what checksums have come.

        Args:
          parts: of as many rows each as one of `RUN_SIZES`, and no more in all.

        Returns:
          u8[n, m], of as many rows as a copy, of which those behind the last part are zeros; and
          u32[n, 2].
        """
        packed, sums = self._memory.to_device(parts, padded(sum(part.shape[0] for part in parts)))
        if self._mesh is None:
            packed = compat.uncommitted(packed)
        else:
            packed = jax.device_put(packed, NamedSharding(self._mesh, P()))
        numbers = np.asarray(sums)
        jax.block_until_ready(packed)
        return packed, numbers

    def _of_one_device(self, packed: jax.Array) -> jax.Array:
        if len(packed.devices()) > 1 and packed.sharding.is_fully_replicated:
            shards = packed.addressable_shards
            return next(one.data for one in shards if one.device == self._device)
        return packed if self._mesh is None else jax.device_put(packed, self._device)


_sums = jax.jit(row_sums)


@functools.partial(jax.jit, static_argnums=2)
def _part(packed: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """So many rows of u8[n, m]."""
    return jax.lax.dynamic_slice_in_dim(packed, start, size)


@functools.partial(jax.jit, donate_argnums=0)
def _place(room: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    """Rows u8[n, m] with others in the place of those from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(room, part, start, 0)


@functools.lru_cache(maxsize=64)
def _room(where: SingleDeviceSharding, rows: int, width: int) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros((rows, width), jnp.uint8), out_shardings=where)
