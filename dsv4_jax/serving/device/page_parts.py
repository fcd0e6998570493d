"""PageParts: what of the pages the devices of this process have, in its own memory of the host.

Where a mesh spans several processes, each keeps the rows of its own devices and gives them back to
these. Process 0 says what is kept under which number, and when it goes; all processes are told the
same in the same order, and launch the same programs. What takes its time runs in threads, and
each process reports when its part of a move has ended, and how.

    devices u8[n, m] each ──> parts of a slab, on the host ──> devices u8[n, m] each
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax.allocator.host_tier import on_host
from dsv4_jax.cache.device_rows import pack_own_rows, unpack_own_rows
from dsv4_jax.cache.row_sums import as_number, sum_of_row
from dsv4_jax.mesh import BY_DEVICE
from dsv4_jax.serving.device.page_memory import DeviceMemory, padded, parts_of, run_sizes
from dsv4_jax.serving.device.page_owners import PageOwners

_FETCHING = 16
"""Threads that copy to the devices: each waits for the steps before its copy, and before its
checksums."""

type Bad = list[tuple[int, int]]
"""Damaged rows: number of a slab, and the row in it."""
type Report = Callable[[int, Bad, str], None]
"""Gets the number of a move that has ended, damaged rows, and what went wrong, or nothing."""


@dataclasses.dataclass(eq=False)
class PartSlab:
    """Of a slab, what this process has.

    `dealt` says of each device of the data shard which rows it had. `parts` and `sums` are, by
    device of that shard, its rows and their checksums, one copy where several have the same.
    """

    of: str
    shard: int
    num_rows: int
    dealt: tuple[np.ndarray, ...]
    filling: concurrent.futures.Future[None]
    parts: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    sums: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Brought:
    """Slabs that have come: u8[d n, m], and the places of each device's rows among all."""

    of: str
    shard: int
    packed: jax.Array
    places: list[np.ndarray]


class PageParts:
    """Pages of one process among several."""

    def __init__(
        self,
        mesh: Mesh,
        owners: PageOwners,
        pools: Callable[[str], Any],
        bytes_of_row: Callable[[str], int],
        report: Report,
    ) -> None:
        """Starts with nothing.

        Args:
          mesh: of all processes.
          owners: who has which row.
          pools: those of "blocks" or "snapshots" as they are now.
          bytes_of_row: of these.
          report: as above; any thread calls it.
        """
        self._mesh, self._owners, self._pools = mesh, owners, pools
        self._bytes_of_row, self._report = bytes_of_row, report
        self._process = jax.process_index()
        self._memories = {
            place: DeviceMemory(device)
            for place, device in np.ndenumerate(mesh.devices)
            if device.process_index == self._process
        }
        self._slabs: dict[int, PartSlab] = {}
        self._brought: dict[int, _Brought] = {}
        self._fetches: dict[int, concurrent.futures.Future[None]] = {}
        self._lock = threading.Lock()
        self._storer = concurrent.futures.ThreadPoolExecutor(1, "host-cache-store")
        self._fetcher = concurrent.futures.ThreadPoolExecutor(_FETCHING, "host-cache-fetch")

    @property
    def num_bytes(self) -> int:
        """Of the slabs that are there."""
        kept = (part for one in list(self._slabs.values()) for part in one.parts.values())
        return sum(array.nbytes for part in kept for array in part)

    def store(self, of: str, rows: np.ndarray, slabs: np.ndarray, move: int) -> Any:
        """Packs rows i32[n] of one data shard, and begins to copy them to slabs.

        Args:
          of: "blocks" or "snapshots".
          rows: as they are numbered through all data shards.
          slabs: i64[k, 2], numbers of new ones and how many of the rows each takes.
          move: its number.

        Returns:
          What was packed.
        """
        dealt, width = self._owners.deal(of, rows), self._bytes_of_row(of)
        shard = int(self._owners.shard_of(of, rows[:1])[0])
        asked = {
            (shard, place): self._owners.own(of, rows[mine], shard, place)
            for place, mine in enumerate(dealt)
        }
        packed, found = self._pack(of, asked)
        new, ends = list[PartSlab](), np.cumsum(slabs[:, 1]).tolist()
        filling: concurrent.futures.Future[None] = concurrent.futures.Future()
        for (number, count), end in zip(slabs.tolist(), ends, strict=True):
            first = end - count
            inside = [one[(one >= first) & (one < end)] - first for one in dealt]
            slab = PartSlab(of, shard, count, tuple(inside), filling)
            new.append(slab)
            self._slabs[number] = slab
        sources = self._sources(of, shard)
        arrays = {
            place: (self._local(packed, (shard, place)), self._local(found, (shard, place)))
            for place in sources
        }

        def fill() -> Bad:
            try:
                for place in sources:
                    counts = [list(parts_of(len(slab.dealt[place]), width)) for slab in new]
                    sizes = list(itertools.chain.from_iterable(counts))
                    if not sizes:
                        continue
                    memory = self._memories[shard, place]
                    parts, sums = memory.to_host(*arrays.pop(place), sizes)
                    left, start = iter(parts), 0
                    for slab, own in zip(new, counts, strict=True):
                        slab.parts[place] = list(itertools.islice(left, len(own)))
                        slab.sums[place] = sums[start : start + sum(own)]
                        start += sum(own)
            except BaseException as error:
                filling.set_exception(error)
                raise
            filling.set_result(None)
            return []

        self._begin(self._storer, move, fill)
        return packed, found

    def fetch(self, numbers: Sequence[int], move: int) -> None:
        """Begins to bring slabs of one kind and data shard to the devices, in this order."""
        slabs = [self._slabs.get(number) for number in numbers]

        def bring() -> Bad:
            found = [slab for slab in slabs if slab is not None]
            if len(found) < len(slabs):
                raise LookupError(f"slabs of {list(numbers)} are not there")
            for slab in found:
                slab.filling.result()
            brought, bad = self._gather(numbers, found)
            with self._lock:
                if move in self._fetches:
                    self._brought[move] = brought
            return bad

        with self._lock:
            self._fetches[move] = concurrent.futures.Future()
        self._fetches[move] = self._begin(self._fetcher, move, bring)

    def put(self, rows: np.ndarray, move: int) -> tuple[str, Any]:
        """Pools in which the rows of slabs that have come are where they belong.

        Args:
          rows: i32[n], of all rows of the slabs where each belongs, as numbered through all data
            shards, of one of them; -1 is nowhere.
          move: by which all processes have brought them.

        Returns:
          Which pools, and what they are then; the old ones are gone.
        """
        with self._lock:
            brought = self._brought.pop(move)
            del self._fetches[move]
        of, owners = brought.of, self._owners
        wanted = {
            (data, place): owners.own(of, rows[brought.places[place]], data, place)
            for data, place in np.ndindex(*owners.processes.shape)
        }
        there = rows[rows >= 0]
        crosses = (owners.shard_of(of, there) != brought.shard).any()
        pools = unpack_own_rows(
            self._pools(of),
            self._on_devices(wanted, brought.packed.shape[0] // self._mesh.size),
            brought.packed,
            self._everywhere(np.bool_(crosses)),
            self._mesh,
            is_split=owners.is_split(of),
        )
        return of, pools

    def drop(self, numbers: Iterable[int]) -> None:
        """Takes slabs out, and ends moves to the devices that nobody waits for."""
        with self._lock:
            for number in numbers:
                self._slabs.pop(number, None)
                self._brought.pop(number, None)
                if fetch := self._fetches.pop(number, None):
                    fetch.cancel()

    def clear(self) -> None:
        """Nothing is there, and nothing comes."""
        self.drop([*self._slabs, *self._fetches])

    def check(self, move: int) -> None:
        """Begins to look for rows whose bytes are not those that came."""
        slabs = dict(self._slabs)

        def look() -> Bad:
            bad: Bad = []
            for number, slab in slabs.items():
                if not slab.filling.done():
                    continue
                for place, parts in slab.parts.items():
                    data = [row for part in parts for row in on_host(part)]
                    for row, its, wanted in zip(
                        slab.dealt[place].tolist(), data, slab.sums[place], strict=True
                    ):
                        if sum_of_row(its) != as_number(wanted):
                            bad.append((number, row))
            return bad

        self._begin(self._fetcher, move, look)

    def warm(self, of: str, count: int) -> tuple[str, Any]:
        """Compiles and runs, idle, the programs of copies of so many rows; pools as `put` does."""
        nowhere = {
            place: np.full(count, -1, np.int32) for place in np.ndindex(self._mesh.devices.shape)
        }
        (packed, found), crosses = self._pack(of, nowhere), self._everywhere(np.bool_(False))
        sizes = [size for size in run_sizes(self._bytes_of_row(of)) if size <= count]

        def copy() -> None:
            for place, memory in self._memories.items():
                for size in sizes:
                    own = self._local(packed, place), self._local(found, place)
                    parts, _ = memory.to_host(*own, [size])
                    jax.block_until_ready(memory.to_device(parts * (count // size), count))
                memory.zeros(count, packed.shape[1])

        self._fetcher.submit(copy).result()
        pools, rows = self._pools(of), self._on_devices(nowhere, count)
        kinds = {"is_split": self._owners.is_split(of)}
        return of, unpack_own_rows(pools, rows, packed, crosses, self._mesh, **kinds)

    def _begin(
        self, thread: concurrent.futures.ThreadPoolExecutor, move: int, job: Callable[[], Bad]
    ) -> concurrent.futures.Future[None]:
        def run() -> None:
            bad: Bad = []
            wrong = ""
            try:
                bad = job()
            except BaseException as error:  # whatever it is, process 0 waits for a word
                wrong = f"{type(error).__name__}: {error}"
            self._report(move, bad, wrong)

        return thread.submit(run)

    def _sources(self, of: str, shard: int) -> list[int]:
        """Devices here of a data shard whose rows are kept: one of those that have the same."""
        places = [place for data, place in self._memories if data == shard]
        return places if self._owners.is_split(of) else places[:1]

    def _gather(self, numbers: Sequence[int], slabs: Sequence[PartSlab]) -> tuple[_Brought, Bad]:
        of, shard = slabs[0].of, slabs[0].shard
        starts = np.cumsum([0, *(slab.num_rows for slab in slabs)]).tolist()
        model = self._owners.processes.shape[1]
        places = [
            np.concatenate(
                [slab.dealt[place] + start for slab, start in zip(slabs, starts, strict=False)]
            )
            for place in range(model)
        ]
        rows = padded(max(map(len, places)))
        bad: Bad = []
        width, arrays = self._bytes_of_row(of), dict[tuple[int, int], jax.Array]()
        for place in self._sources(of, shard):
            parts = [part for slab in slabs for part in slab.parts.get(place, ())]
            if not parts:
                continue
            packed, sums = self._memories[shard, place].to_device(parts, rows)
            wanted = np.concatenate([slab.sums[place] for slab in slabs if place in slab.sums])
            wrong = (np.asarray(sums)[: len(wanted)] != wanted).any(axis=1)
            for number in places[place][wrong].tolist():
                which = int(np.searchsorted(starts, number, "right")) - 1
                bad.append((numbers[which], number - starts[which]))
            arrays[shard, place] = packed
        source = next(iter(arrays.values()), None)
        for at, memory in self._memories.items():
            if at not in arrays:
                is_copy = at[0] == shard and not self._owners.is_split(of)
                arrays[at] = (
                    jax.device_put(source, memory.device)
                    if is_copy and source is not None
                    else memory.zeros(rows, width)
                )
        where = NamedSharding(self._mesh, BY_DEVICE)
        shape = (self._mesh.size * rows, width)
        whole = jax.make_array_from_single_device_arrays(shape, where, list(arrays.values()))
        jax.block_until_ready(list(arrays.values()))
        return _Brought(of, shard, whole, places), bad

    def _pack(
        self, of: str, asked: dict[tuple[int, int], np.ndarray]
    ) -> tuple[jax.Array, jax.Array]:
        rows = padded(max(map(len, asked.values())))
        is_split = self._owners.is_split(of)
        placed = self._on_devices(asked, rows)
        return pack_own_rows(self._pools(of), placed, self._mesh, is_split=is_split)

    def _on_devices(self, rows: dict[tuple[int, int], np.ndarray], count: int) -> jax.Array:
        """Rows of each device, and up to `count` -1: i32[d count] on the mesh."""
        every = np.full((*self._owners.processes.shape, count), -1, np.int32)
        for place, own in rows.items():
            every[place][: len(own)] = own
        flat = every.reshape(-1)
        where = NamedSharding(self._mesh, BY_DEVICE)
        return jax.make_array_from_callback(flat.shape, where, lambda part: flat[part])

    def _everywhere(self, value: np.bool_) -> jax.Array:
        where = NamedSharding(self._mesh, P())
        return jax.make_array_from_callback((), where, lambda part: np.asarray(value)[part])

    def _local(self, packed: jax.Array, at: tuple[int, int]) -> jax.Array:
        device = self._memories[at].device
        return next(one.data for one in packed.addressable_shards if one.device == device)
