"""HostedArrays: an engine's arrays on a mesh of several processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dsv4_jax.hosts import Hosts
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.serving.device.answers import Answers
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.host_calls import BUILT, CALLS, STOP, every_process, pack, unpack
from dsv4_jax.serving.device.page_memory import run_sizes
from dsv4_jax.serving.device.page_owners import PageOwners
from dsv4_jax.serving.device.page_parts import PageParts
from dsv4_jax.serving.sizing import EnginePlan


class HostedArrays(EngineArrays):
    """`EngineArrays` where process 0 tells the others of each call, and all of them make it.

    Each method that is marked `every_process` tells first, and then is what it is there.

    Attributes:
      hosts: the processes.
      answers: in process 0, what the others say of pages that move.
      owners: who has which rows of the pools.
    """

    def __init__(self, params: DSV4Params, plan: EnginePlan, hosts: Hosts) -> None:
        """Allocates the pools.

        Args:
          params: model parameters.
          plan: sizes of the engine.
          hosts: the processes of the mesh.

        Raises:
          RuntimeError: another engine is open on them.
        """
        if hosts.is_taken:
            raise RuntimeError("processes serve one engine at a time; close the one there is first")
        hosts.is_taken = True
        self.hosts = hosts
        self._made: set[object] = set()
        super().__init__(params, plan, hosts)
        self.answers = Answers(hosts)
        mesh = plan.mesh
        assert mesh is not None, "several processes have one"
        num_rows = {"blocks": self.cache.num_blocks, "snapshots": self.store.num_snapshots}
        splits = plan.options.split_cache
        self.owners = PageOwners(mesh, num_rows, splits_blocks=splits)
        kinds = {"pools": self._pools, "bytes_of_row": self.bytes_of_row}
        self._parts = PageParts(mesh, self.owners, **kinds, report=self.answers.report)
        if not hosts.number:
            hosts.tell(pack(BUILT, repr(plan)))

    def follow(self) -> None:
        """Makes the calls that process 0 tells of, until it stops."""
        hosts = self.hosts
        while True:
            name, arguments, options = unpack(hosts.listen())
            if name == STOP:
                hosts.is_taken = False
                self._parts.clear()
                return
            if name == BUILT:
                if arguments != [repr(self._plan)]:
                    hosts.end(
                        f"process 0 built its engine otherwise: {arguments[0]}, and process "
                        f"{hosts.number} {self._plan!r}"
                    )
                continue
            with hosts.call(is_new=self.is_new(name, arguments, options)):
                CALLS[name](self, *arguments, **options)

    def stop(self) -> None:
        """Ends `follow` in the other processes."""
        if not self.hosts.number:
            self.hosts.tell(pack(STOP))
            self.hosts.is_taken = False
            self.answers.close()
            self._parts.clear()

    @every_process
    def empty_pages(self) -> None:
        """No page is kept on the host."""
        self._parts.clear()

    @every_process
    def store_pages(
        self, of: str, rows: np.ndarray, slabs: np.ndarray, move: np.ndarray, gone: np.ndarray
    ) -> None:
        """`PageParts.store`, after what is `gone` is dropped; i64[1] has the number of the move."""
        self._parts.drop(gone.tolist())
        packed = self._parts.store(of, rows, slabs, int(move[0]))
        if self._waits:
            jax.block_until_ready(packed)

    @every_process
    def fetch_pages(self, slabs: np.ndarray, move: np.ndarray, gone: np.ndarray) -> None:
        """`PageParts.fetch` of slabs i64[k], likewise."""
        self._parts.drop(gone.tolist())
        self._parts.fetch(slabs.tolist(), int(move[0]))

    @every_process
    def put_pages(self, rows: np.ndarray, move: np.ndarray) -> None:
        """`PageParts.put`, of pages that all processes have brought."""
        self._set_and_wait(*self._parts.put(rows, int(move[0])))

    @every_process
    def drop_pages(self, gone: np.ndarray) -> None:
        """`PageParts.drop`."""
        self._parts.drop(gone.tolist())

    @every_process
    def check_pages(self, move: np.ndarray) -> None:
        """`PageParts.check`."""
        self._parts.check(int(move[0]))

    @every_process
    def warm_pages(self, of: str, count: int) -> None:
        """`PageParts.warm`."""
        self._set_and_wait(*self._parts.warm(of, count))

    def _set_and_wait(self, of: str, pools: Any) -> None:
        self._set_pools(of, pools)
        if self._waits:
            jax.block_until_ready(pools)

    def is_new(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Whether a call may have to be compiled: none of its sizes was made before."""
        leaves = jax.tree.leaves((list(arguments), dict(options)))
        key = (name, *(leaf.shape if hasattr(leaf, "shape") else leaf for leaf in leaves))
        if key in self._made:
            return False
        self._made.add(key)
        return True


def follows(devices: EngineArrays) -> bool:
    """Whether another process schedules what these do."""
    return isinstance(devices, HostedArrays) and devices.hosts.number > 0


def page_jobs(devices: HostedArrays) -> list[tuple[str, Callable[[], object]]]:
    """By name, what compiles and runs the programs that copy blocks and snapshots, idle."""

    def copy(of: str) -> None:
        for count in run_sizes(devices.bytes_of_row(of)):
            devices.warm_pages(of, count)

    return [(f"copies of {of}", functools.partial(copy, of)) for of in ("blocks", "snapshots")]


def _told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `EngineArrays`, of which the other processes are told first."""

    @functools.wraps(call)
    def tell(self: HostedArrays, *arguments: Any, **options: Any) -> Any:
        with self.hosts.call(is_new=self.is_new(name, arguments, options)):
            self.hosts.tell(pack(name, *arguments, **options))
            return call(self, *arguments, **options)

    return tell


for _name, _call in CALLS.items():
    setattr(HostedArrays, _name, _told(_name, _call))
