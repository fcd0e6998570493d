"""Moves of pages between the devices and the slabs of a host tier, of one process or several."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.host_tier import HostTier, Page, Slab
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.serving.device.answers import Answer
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.far_pages import DamagedError, FarRun, gather_run
from dsv4_jax.serving.device.hosted_arrays import HostedArrays
from dsv4_jax.serving.device.page_memory import PageMemory, padded_rows

_FETCHING = 16
"""Threads that copy to the devices: each waits for the steps before its copy, and before its
checksums."""


class Place(NamedTuple):
    """Where pages lie.

    Attributes:
      bytes_at: what they take in each process; None where there is one.
      shard: the data shard that they came from, where that matters.
    """

    bytes_at: Sequence[int] | None
    shard: int


class PageMoves(Protocol):
    """Copies begin here, in an order, and end in threads."""

    def place_of(self, of: str, rows: np.ndarray) -> Place:
        """Where rows i32[n] of a data shard will lie."""
        ...

    def store(
        self, of: str, rows: np.ndarray, slabs: Sequence[Slab]
    ) -> concurrent.futures.Future[None]:
        """Begins to fill slabs, one after the other, with rows i32[n] of the pools."""
        ...

    def fetch(self, run: FarRun) -> concurrent.futures.Future[Any]:
        """Begins to bring a run to the devices, where all its rows are to be found."""
        ...

    def put(self, run: FarRun, rows: np.ndarray) -> None:
        """Brings the first pages of a run, which has come, to rows i32[n] of the pools."""

    def forget(self, run: FarRun) -> None:
        """Nobody waits for a run that was begun and not put."""

    def tell(self) -> None:
        """Brings word of slabs that are gone to whoever keeps them."""

    def problems(self) -> list[Problem]:
        """What is wrong with pages that other processes keep, and this one for them."""
        ...

    def close(self) -> None:
        """What has not begun never will."""


def make_moves(
    devices: EngineArrays, max_bytes: int, disk: DiskTier | None
) -> tuple[HostTier, PageMoves]:
    """An empty tier of so many bytes in each process, and the moves of its pages."""
    if isinstance(devices, HostedArrays):
        tier = HostTier(max_bytes, devices.hosts.count)
        return tier, SharedMoves(devices, tier)
    return HostTier(max_bytes), OwnMoves(devices, devices.cache, disk)


class OwnMoves:
    """Where all devices are in this process.

    Attributes:
      memory: of pages.
    """

    def __init__(self, devices: EngineArrays, pools: Any, disk: DiskTier | None) -> None:
        """Of these arrays, whose devices `pools` show, and of files if there are any."""
        self.memory = PageMemory(pools)
        self._devices, self._disk = devices, disk
        # One that stores must not keep one that fetches waiting.
        self._storer = concurrent.futures.ThreadPoolExecutor(1, "host-cache-store")
        self._fetcher = concurrent.futures.ThreadPoolExecutor(_FETCHING, "host-cache-fetch")

    def place_of(self, of: str, rows: np.ndarray) -> Place:
        """It does not matter."""
        del of, rows
        return Place(None, 0)

    def store(
        self, of: str, rows: np.ndarray, slabs: Sequence[Slab]
    ) -> concurrent.futures.Future[None]:
        """See `PageMoves`."""
        packed, found = self._devices.take_rows(of, padded_rows(rows))
        sizes = [slab.num_rows for slab in slabs]

        def fill() -> None:
            parts, sums = self.memory.to_host(packed, found, sizes)
            start = 0
            for slab, part, count in zip(slabs, parts, sizes, strict=True):
                slab.data, slab.sums = part, sums[start : start + count]
                start += count

        return self._storer.submit(fill)

    def fetch(self, run: FarRun) -> concurrent.futures.Future[jax.Array]:
        """See `PageMoves`."""
        return self._fetcher.submit(gather_run, self.memory, self._disk, run)

    def put(self, run: FarRun, rows: np.ndarray) -> None:
        """See `PageMoves`."""
        assert run.packed is not None
        packed = run.packed.result()
        numbers = np.full(packed.shape[0], -1, np.int32)
        numbers[run.places[: len(rows)]] = rows
        self._devices.put_rows(run.of, numbers, packed)

    def forget(self, run: FarRun) -> None:
        """See `PageMoves`."""
        if run.packed is not None:
            run.packed.cancel()

    def tell(self) -> None:
        """There is nobody to tell."""

    def problems(self) -> list[Problem]:
        """There are no others."""
        return []

    def close(self) -> None:
        """See `PageMoves`."""
        self._storer.shutdown(wait=False, cancel_futures=True)
        self._fetcher.shutdown(wait=False, cancel_futures=True)


class SharedMoves:
    """Where the mesh spans several processes, in process 0, which tells the others.

    Each process keeps what its own devices have of a slab, under a number. A copy has ended when
    all have answered, and has failed if it did anywhere: then nobody goes on with it.
    """

    def __init__(self, devices: HostedArrays, tier: HostTier) -> None:
        """Nothing is kept by any process."""
        self._devices, self._tier = devices, tier
        self._numbers: dict[Slab, int] = {}
        self._moves: dict[FarRun, int] = {}
        self._gone: list[int] = []
        tier.gone = []
        devices.empty_pages()

    def place_of(self, of: str, rows: np.ndarray) -> Place:
        """See `PageMoves`."""
        owners, size = self._devices.owners, self._devices.bytes_of_row(of)
        return Place(owners.bytes_at(of, rows, size), int(owners.shard_of(of, rows)[0]))

    def store(
        self, of: str, rows: np.ndarray, slabs: Sequence[Slab]
    ) -> concurrent.futures.Future[None]:
        """See `PageMoves`."""

        def conclude(answers: Sequence[Answer]) -> None:
            _raise_first(answers)

        move, future = self._devices.answers.expect(conclude)
        for slab in slabs:
            self._numbers[slab] = self._devices.hosts.next_number()
        told = np.array([(self._numbers[slab], slab.num_rows) for slab in slabs], np.int64)
        self._devices.store_pages(of, rows, told, np.array([move]), self._take_gone())
        return future

    def fetch(self, run: FarRun) -> concurrent.futures.Future[None]:
        """See `PageMoves`."""
        numbers = [self._numbers[slab] for slab in run.slabs]

        def conclude(answers: Sequence[Answer]) -> None:
            damaged = {one for answer in answers for one in answer.damaged}
            pages = [
                page
                for page in run.pages
                if isinstance(page, Page)
                and (numbers[run.slabs.index(page.slab)], page.row) in damaged
            ]
            if pages:
                raise DamagedError(*pages)
            _raise_first(answers)

        move, future = self._devices.answers.expect(conclude)
        self._moves[run] = move
        self._devices.fetch_pages(np.array(numbers), np.array([move]), self._take_gone())
        return future

    def put(self, run: FarRun, rows: np.ndarray) -> None:
        """See `PageMoves`."""
        numbers = np.full(sum(slab.num_rows for slab in run.slabs), -1, np.int32)
        numbers[run.places[: len(rows)]] = rows
        self._devices.put_pages(numbers, np.array([self._moves.pop(run)]))

    def forget(self, run: FarRun) -> None:
        """See `PageMoves`."""
        if (move := self._moves.pop(run, None)) is not None:
            self._devices.answers.forget([move])
            self._gone.append(move)

    def tell(self) -> None:
        """See `PageMoves`."""
        if self._gone or self._tier.gone:
            self._devices.drop_pages(self._take_gone())

    def problems(self) -> list[Problem]:
        """See `PageMoves`; it waits for all processes."""

        def conclude(answers: Sequence[Answer]) -> list[Problem]:
            _raise_first(answers)
            slabs = {number: slab for slab, number in self._numbers.items()}
            found = []
            for process, damaged, _ in answers:
                for number, row in damaged:
                    slab = slabs[number]
                    where = f"host {slab.of} {slab.contents[row].key.hex()}, process {process}"
                    found.append(Problem("checksum", where, "its bytes are not those that came"))
            return found

        self.tell()
        move, future = self._devices.answers.expect(conclude)
        self._devices.check_pages(np.array([move]))
        return future.result()

    def close(self) -> None:
        """See `PageMoves`."""
        self._devices.answers.forget(list(self._moves.values()))
        self._moves.clear()

    def _take_gone(self) -> np.ndarray:
        """i64[n]: numbers of slabs and moves that are gone since this was asked last."""
        slabs, self._tier.gone = self._tier.gone or [], []
        gone, self._gone = [*self._gone, *(self._numbers.pop(slab) for slab in slabs)], []
        return np.array(gone, np.int64)


def _raise_first(answers: Sequence[Answer]) -> None:
    for process, _, wrong in answers:
        if wrong:
            raise RuntimeError(f"process {process}: {wrong}")
