"""Pages on their way to host and disk, without an engine: how much memory they take."""

import itertools
import pathlib
import resource
import types

import jax
import numpy as np
import pytest

from dsv4_jax.allocator.block_contents import BlockContent
from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.host_tier import HostTier
from dsv4_jax.allocator.leaving import Leaving
from dsv4_jax.cache.row_sums import row_sums
from dsv4_jax.serving.device import page_memory, page_stores
from dsv4_jax.serving.device.disk_writes import DiskWrites
from dsv4_jax.serving.device.far_pages import gather_run, runs_of
from dsv4_jax.serving.device.page_moves import OwnMoves
from dsv4_jax.serving.device.page_stores import PageStores
from dsv4_jax.serving.metrics.metrics import Metrics

ROW = 2**16
MIB = 2**20


class Devices:
    """Rows of random bytes, each of its number, as an engine's arrays would give them."""

    def __init__(self):
        self.cache = types.SimpleNamespace(num_blocks=10**9)
        self.store = types.SimpleNamespace(num_snapshots=10**9)

    def bytes_of_row(self, of):
        return ROW

    def take_rows(self, of, rows):
        packed = jax.numpy.asarray(np.stack([self.row(number) for number in rows]))
        return packed, row_sums(packed)

    def row(self, number):
        return np.random.default_rng(number + 1).integers(0, 256, ROW, np.uint8)


@pytest.fixture
def stores(tmp_path):
    """Stores of a tree that lets go what the test says, with a disk."""
    devices, tier = Devices(), HostTier(64 * MIB)
    tree = types.SimpleNamespace(leaving=[], unused=[])
    manager = types.SimpleNamespace(prefixes=types.SimpleNamespace(tree=tree))
    shards = types.SimpleNamespace(managers=[manager])
    disk = DiskTier(str(tmp_path / "pages"), 64 * MIB, {"model": "a"})
    moves = OwnMoves(devices, jax.numpy.zeros(1), None)
    metrics = Metrics()
    writes = DiskWrites(disk, tier, metrics)
    stores = PageStores(devices, shards, tier, moves, writes, metrics)
    stores.tree, stores.disk, stores.moves = tree, disk, moves
    yield stores
    stores.settle(60.0)
    stores.close()
    disk.close()


def leaving(number):
    content = BlockContent(number.to_bytes(16, "big"), b"tokens%d" % number)
    return Leaving("blocks", number, content, b"", 128)


def resident_bytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_rows_come_to_slabs_of_exact_sizes_and_back(stores):
    """21 rows are slabs of 16, 4 and 1: no memory is taken for rows that nobody has."""
    stores.tree.leaving += [leaving(number) for number in reversed(range(21))]
    stores.keep()
    stores.settle(60.0)
    tier = stores.tier
    assert sorted(slab.num_rows for slab in tier.slabs) == [1, 4, 16]
    assert tier.num_bytes == 21 * ROW == sum(slab.data.nbytes for slab in tier.slabs)
    pages = [tier.get("blocks", leaving(number).content.key) for number in (3, 17, 20, 4)]
    (run,) = runs_of("blocks", pages, ROW)
    packed = np.asarray(gather_run(stores.moves.memory, None, run))
    for page, place, number in zip(pages, run.places, (3, 17, 20, 4), strict=True):
        assert page.row == {3: 3, 17: 1, 20: 0, 4: 4}[number]
        np.testing.assert_array_equal(packed[place], Devices().row(number))


def test_what_waits_to_be_written_keeps_no_bytes_that_gave_way(stores, monkeypatch):
    """Known bug of SGLang's HiCache (sgl-project/sglang 19332): views kept what had been freed."""
    monkeypatch.setattr(stores.writes, "move", lambda: None)
    stores.tree.leaving += [leaving(number) for number in range(64)]
    stores.keep()
    stores.settle(60.0)
    waiting = list(stores.writes._waiting)
    assert len(waiting) == 64
    stores.tier.max_bytes = 0
    assert stores.tier.add("blocks", [leaving(99)], ROW) is None
    stores.tier.max_bytes = 64 * ROW
    assert stores.tier.add("blocks", [leaving(99)], ROW) is not None
    assert {page.slab.data is None for page in waiting} == {True}


@pytest.mark.slow
def test_a_long_life_takes_no_more_memory_than_was_asked_for(stores, monkeypatch):
    """64 MiB are asked for, and 40 times 32 MiB go through host and disk, and some come back."""
    monkeypatch.setattr(page_stores, "MOST_STORING_BYTES", 32 * MIB)
    monkeypatch.setattr(page_memory, "MOST_RUN_BYTES", 2 * MIB)
    numbers, sizes = itertools.count(), []
    sizes.append(resident_bytes())
    for _ in range(40):
        latest = list(itertools.islice(numbers, 512))
        for start in range(0, 512, 128):
            stores.tree.leaving += [leaving(number) for number in latest[start : start + 128]]
            stores.keep()
            stores.settle(60.0)
        pages = [stores.tier.get("blocks", leaving(number).content.key) for number in latest]
        for run in runs_of("blocks", [page for page in pages if page], ROW)[:8]:
            gather_run(stores.moves.memory, None, run)
        sizes.append(resident_bytes())
        assert stores.tier.num_bytes <= 64 * MIB
        assert stores.disk.num_bytes <= 64 * MIB
    assert stores.disk.stored_bytes > 320 * MIB
    # Beside the pages there are copies on their way, which on CPUs are the host's memory too, files
    # that are written, and what allocators keep of it: the same after twice the time.
    assert max(sizes) - sizes[0] < (64 + 192) * MIB
    assert max(sizes[20:]) - max(sizes[5:20]) < 64 * MIB
