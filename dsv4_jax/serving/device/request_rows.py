"""What the devices hold of one request, brought to the host and back."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from dsv4_jax import checks
from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.cache.packed_rows import row_bytes
from dsv4_jax.config import Idea
from dsv4_jax.mesh import mesh_sizes
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.page_memory import PageMemory, padded_rows, run_sizes
from dsv4_jax.serving.requests.cached_rows import CachedRows
from dsv4_jax.serving.sizing import EnginePlan
from pallas_kernels.common.formats import get_cache_format

_PUTS_AT_ONCE = 8
"""Copies to the devices, each in memory of theirs until its rows are where they belong."""

_COPIES_AT_ONCE = 2
"""Copies to the host: one is on its way while the next one is packed."""


def engine_shape(plan: EnginePlan) -> dict[str, str]:
    """By name, what engines must agree in to go on with each other's requests to the bit.

    Weights are not among it, nor are sizes: the length of a context and of steps, slots and blocks.
    """
    config = plan.config
    told = {
        f"config.{field.name}": _told(getattr(config, field.name))
        for field in dataclasses.fields(config)
    }
    data, model = (1, 1) if plan.mesh is None else mesh_sizes(plan.mesh)
    return told | {
        "cache_format": get_cache_format(plan.cache_format).name,
        "mesh": f"data={data} model={model}",
        "split_cache": str(plan.options.split_cache),
        "activations": plan.options.activations,
        "prefill_activations": plan.prefill_activations,
    }


def check_rows(devices: EngineArrays, rows: CachedRows, block_tokens: int) -> None:
    """Refuses rows that are not of the sizes of these pools.

    Raises:
      ValueError: a slot or a block has other bytes, or there are not the blocks of the tokens.
    """
    blocks = -(-rows.length_tokens // block_tokens)
    checks.array("slot", rows.slot, (row_bytes(devices.cache.state),), "u")
    checks.array("blocks", rows.blocks, (blocks, row_bytes(devices.cache.paged)), "u")


def take_request(devices: EngineArrays, shards: DataShards, slot: int) -> CachedRows:
    """What a request holds that no step in flight writes to; it waits for the copies."""
    length = shards.length_of(slot)
    (ring,) = _take(devices, "slots", np.array([slot], np.int32))
    blocks = _take(devices, "blocks", _blocks_of(devices, shards, slot, length))
    return CachedRows(length, ring, blocks)


def put_request(devices: EngineArrays, shards: DataShards, slot: int, rows: CachedRows) -> None:
    """Gives rows to a request, whose slot and blocks the devices know of."""
    devices.put_rows("slots", np.array([slot], np.int32), rows.slot[None])
    blocks = _blocks_of(devices, shards, slot, rows.length_tokens)
    for number, part in enumerate(_runs(len(blocks), devices.bytes_of_row("blocks")), 1):
        padded, packed = padded_rows(blocks[part]), rows.blocks[part]
        room = np.zeros((len(padded), packed.shape[1]), np.uint8)
        room[: len(packed)] = packed
        devices.put_rows("blocks", padded, room)
        if not number % _PUTS_AT_ONCE:
            jax.block_until_ready(devices.cache.paged)


def copy_jobs(devices: EngineArrays) -> list[tuple[str, Callable[[], object]]]:
    """By name, what compiles and runs the programs that copy slots, blocks and snapshots, idle."""
    memory = PageMemory(devices.cache)

    def copy(of: str) -> None:
        # A context of the caller's, such as of dtype promotion, is not that of other threads, which
        # would compile again.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            sizes = run_sizes(devices.bytes_of_row(of))
            for count in sizes:
                nowhere = np.full(count, -1, np.int32)
                taken, sums = devices.take_rows(of, nowhere)
                smaller = [size for size in sizes if size < count]
                whole, _ = thread.submit(memory.to_host, taken, sums, [count]).result()
                packed, _ = thread.submit(memory.to_devices, whole).result()
                for size in smaller:
                    parts, _ = thread.submit(memory.to_host, taken, sums, [size]).result()
                    several = parts * (count // size)
                    packed, _ = thread.submit(memory.to_devices, several).result()
                devices.put_rows(of, nowhere, packed)

    def copy_slot() -> None:
        nowhere = np.full(1, -1, np.int32)
        devices.put_rows("slots", nowhere, np.asarray(devices.take_rows("slots", nowhere)[0]))

    jobs = [(f"copies of {of}", functools.partial(copy, of)) for of in ("blocks", "snapshots")]
    return [*jobs, ("copies of slots", copy_slot)]


def _take(devices: EngineArrays, of: str, rows: np.ndarray) -> np.ndarray:
    """u8[n, bytes], rows i32[n] of one kind."""
    found: list[np.ndarray] = []
    begun: collections.deque[tuple[jax.Array, int]] = collections.deque()
    width = devices.bytes_of_row(of)
    for part in _runs(len(rows), width):
        packed, _ = devices.take_rows(of, padded_rows(rows[part]))
        packed.copy_to_host_async()
        begun.append((packed, part.stop - part.start))
        if len(begun) == _COPIES_AT_ONCE:
            found.append(_end(begun))
    while begun:
        found.append(_end(begun))
    return np.concatenate([np.zeros((0, width), np.uint8), *found])


def _end(begun: collections.deque[tuple[jax.Array, int]]) -> np.ndarray:
    packed, count = begun.popleft()
    return np.asarray(packed)[:count]


def _blocks_of(devices: EngineArrays, shards: DataShards, slot: int, length: int) -> np.ndarray:
    """i32[n], blocks of a request's first tokens, numbered through all data shards."""
    manager, own = shards.of(slot)
    count = -(-length // manager.plan.block_tokens)
    per_shard = devices.cache.num_blocks // len(shards.managers)
    return manager.block_table[own, :count] + np.int32(shards.shard_of(slot) * per_shard)


def _runs(count: int, row_bytes: int) -> Iterator[slice]:
    size = run_sizes(row_bytes)[-1]
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _told(value: object) -> str:
    """A field of a config, the same in every process."""
    if not isinstance(value, Idea):
        return repr(value)
    parts = {name: one for name, one in vars(value).items() if one is not None}
    named = {
        name: f"{one.__module__}.{one.__qualname__}" if hasattr(one, "__qualname__") else repr(one)
        for name, one in parts.items()
    }
    return ", ".join(f"{name}={one}" for name, one in named.items())
