"""Pages of random bytes between devices and hosts, without an engine: for `pages_of_processes`."""

import itertools
import os
import signal
import time

import jax
import numpy as np
from jax.sharding import NamedSharding

from dsv4_jax import hosts
from dsv4_jax.allocator.block_contents import BlockContent
from dsv4_jax.allocator.host_tier import HostTier
from dsv4_jax.allocator.leaving import Leaving
from dsv4_jax.cache.packed_rows import row_bytes
from dsv4_jax.mesh import BY_BLOCK, BY_SLOT
from dsv4_jax.serving.device import hosted_arrays
from dsv4_jax.serving.device.answers import Answers
from dsv4_jax.serving.device.far_pages import runs_of
from dsv4_jax.serving.device.host_calls import every_process
from dsv4_jax.serving.device.hosted_arrays import HostedArrays
from dsv4_jax.serving.device.page_moves import SharedMoves
from dsv4_jax.serving.device.page_owners import PageOwners
from dsv4_jax.serving.device.page_parts import PageParts

NUM_ROWS = {"blocks": 24, "snapshots": 16}
SHAPES = {
    "bytes": lambda of: (3, NUM_ROWS[of], 5),
    "numbers": lambda of: (2, NUM_ROWS[of], 3),
}
LATE_S = 0.5


class Pools(HostedArrays):
    """Planes of an engine's arrays, of bytes and of numbers, in place of a cache and a store."""

    def __init__(self, mesh, joined, *, is_split):
        self.hosts, self._made, self._waits = joined, set(), True
        self._mesh, self._row_bytes = mesh, {}
        self.answers = Answers(joined)
        self.owners = PageOwners(mesh, NUM_ROWS, splits_blocks=is_split)
        self.planes = {of: self.make(of, 1) for of in NUM_ROWS}
        kinds = {"pools": self._pools, "bytes_of_row": self.bytes_of_row}
        self._parts = PageParts(mesh, self.owners, **kinds, report=self.answers.report)

    def make(self, of, seed):
        """Planes of random values, or of zeros; the same in every process."""
        rng = np.random.default_rng(seed)
        where = NamedSharding(self._mesh, BY_BLOCK if self.owners.is_split(of) else BY_SLOT)
        made = {}
        for (name, shape_of), kind in zip(SHAPES.items(), (np.uint8, np.float32), strict=True):
            shape = shape_of(of)
            values = (rng.integers(0, 256, shape) * (seed > 0)).astype(kind)
            make = jax.make_array_from_callback
            made[name] = make(shape, where, lambda part, values=values: values[part])
        return made

    def _pools(self, of):
        return self.planes[of]

    def _set_pools(self, of, pools):
        self.planes[of] = pools


@every_process
def fill(self, seed: int) -> None:
    """Rows of random values, or of zeros."""
    self.planes = {of: self.make(of, seed) for of in NUM_ROWS}


@every_process
def compare(self, of: str, rows: np.ndarray, places: np.ndarray, move: np.ndarray) -> None:
    """Says whether `places` have what `rows` had, and all other rows zeros."""
    wrong = ""
    for name, plane in self.planes[of].items():
        shape = plane.shape
        values = np.random.default_rng(1)
        values = {one: values.integers(0, 256, SHAPES[one](of)) for one in SHAPES}[name]
        wanted = np.zeros(shape, plane.dtype)
        wanted[:, places] = values[:, rows]
        for part in plane.addressable_shards:
            if not np.array_equal(np.asarray(part.data), wanted[part.index]):
                wrong = f"{name} differs on {part.device}"
    self.answers.report(int(move[0]), [], wrong)


@every_process
def act(self, what: str, process: int) -> None:
    """Something goes wrong in one of the processes from now on."""
    if process != self.hosts.number:
        return
    parts = self._parts
    if what == "damage":
        for slab in parts._slabs.values():
            for place, arrays in slab.parts.items():
                if arrays:
                    changed = np.array(arrays[-1])
                    changed[-1, 7] ^= 1
                    slab.parts[place] = [*arrays[:-1], changed]
    for memory in parts._memories.values():
        if what == "fail":
            memory.to_host = _fail
        if what == "late":
            memory.to_device = lambda *a, to=memory.to_device: (time.sleep(LATE_S), to(*a))[1]
        if what == "kill":
            memory.to_device = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if what == "mend":
            vars(memory).pop("to_host", None)
            vars(memory).pop("to_device", None)


for _call in (fill, compare, act):
    setattr(Pools, _call.__name__, hosted_arrays._told(_call.__name__, _call))


def _fail(*_):
    raise MemoryError("no pinned memory")


def look(mesh, number, *, is_split, lost):
    """In process 0 what came of moves of blocks and snapshots; the others follow.

    Each process compares the rows of its devices with what they should have.
    """
    pools = Pools(mesh, hosts.joined(), is_split=is_split)
    if number:
        pools.follow()
        return {}
    try:
        return {of: _Moved(pools, of).look(lost=lost) for of in NUM_ROWS}
    finally:
        pools.stop()  # else the others would wait


class _Moved:
    """Moves of one kind of rows, as process 0 begins them."""

    def __init__(self, pools, of):
        self.pools, self.of, self.size = pools, of, row_bytes(pools.planes[of])
        self.tier = HostTier(10**5, pools.hosts.count)
        self.moves = SharedMoves(pools, self.tier)
        self.per_shard = NUM_ROWS[of] // pools.owners.processes.shape[0]
        # Of a cache that is split the third lies on the other device.
        self.first = np.array([0, 1, 13, 2] if pools.owners.is_split(of) else [0, 1, 4, 2])

    def look(self, *, lost):
        if lost:
            self.store(0)[1].result()
            self.pools.act("kill", 1)
            self.fetch().packed.result()
            raise AssertionError("a process that was killed has answered")
        shards = range(NUM_ROWS[self.of] // self.per_shard)
        found = {"moved": [self.move(*one) for one in itertools.product(shards, shards)]}
        return found | {what: self.go_wrong(what) for what in ("late", "damage", "fail")}

    def store(self, shard):
        """Begins to copy rows of a data shard to slabs of two; their numbers, and the future."""
        rows = (self.first + shard * self.per_shard).astype(np.int32)
        self.pools.fill(1)
        self.slabs = []
        for part in (rows[:2], rows[2:]):
            leaving = [Leaving(self.of, n, BlockContent(b"%d" % n, b"t"), b"", 128) for n in part]
            self.slabs.append(
                self.tier.add(self.of, leaving, self.size, *self.moves.place_of(self.of, part))
            )
        future = self.moves.store(self.of, rows, self.slabs)
        return rows, future

    def fetch(self):
        """Begins to bring back what was stored, but for the first page."""
        pages = [page for slab in self.slabs for page in slab.pages][1:]
        (run,) = runs_of(self.of, pages, self.size)
        run.packed = self.moves.fetch(run)
        return run

    def put(self, run, rows, shard):
        """Puts it to other rows; what each process says of its own."""
        places = self.first[1:] + 3 + shard * self.per_shard
        self.pools.fill(0)
        self.moves.put(run, places.astype(np.int32))
        move, future = self.pools.answers.expect(lambda answers: [one.wrong for one in answers])
        self.pools.compare(self.of, rows[1:], places, np.array([move]))
        return future.result(60)

    def drop(self):
        """Takes the slabs out; what this process keeps then."""
        for slab in self.slabs:
            self.tier.let_go([slab])
            for page in list(slab.pages):
                self.tier.drop(page)
        self.moves.tell()
        return self.pools._parts.num_bytes

    def move(self, source, target):
        """Rows of one data shard come to another one, or to the same."""
        rows, stored = self.store(source)
        stored.result(60)
        kept = self.pools._parts.num_bytes == self.tier.bytes_at[0]
        run = self.fetch()
        run.packed.result(60)
        wrong = self.put(run, rows, target)
        return {"wrong": wrong, "at": self.tier.bytes_at, "kept": kept, "left": self.drop()}

    def go_wrong(self, what):
        """What process 0 finds where process 1 is late, has damaged rows or no memory."""
        if what == "fail":
            self.pools.act(what, 1)
        rows, stored = self.store(self.pools.owners.processes.shape[0] - 1)
        if what == "fail":
            found = repr(stored.exception(60))
        elif what == "damage":
            stored.result(60)
            self.pools.act(what, 1)
            run = self.fetch()
            error = run.packed.exception(60)
            found = [type(error).__name__, sorted(page.content.key.decode() for page in error.args)]
            self.moves.forget(run)
            found.append(sorted({one.where.split(", ")[1] for one in self.moves.problems()}))
        else:
            stored.result(60)
            self.pools.act(what, 1)
            started, run = time.monotonic(), self.fetch()
            run.packed.result(60)
            found = [time.monotonic() - started >= LATE_S, self.put(run, rows, 0)]
        self.pools.act("mend", 1)
        return [found, self.drop()]
