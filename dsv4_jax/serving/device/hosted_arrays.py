"""HostedArrays: an engine's arrays on a mesh of several processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dsv4_jax.hosts import Hosts
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.host_calls import BUILT, CALLS, STOP, pack, unpack
from dsv4_jax.serving.sizing import EnginePlan


class HostedArrays(EngineArrays):
    """`EngineArrays` where process 0 tells the others of each call, and all of them make it.

    Each method that is marked `every_process` tells first, and then is what it is there.
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
        if not hosts.number:
            hosts.tell(pack(BUILT, repr(plan)))

    def follow(self) -> None:
        """Makes the calls that process 0 tells of, until it stops."""
        hosts = self.hosts
        while True:
            name, arguments, options = unpack(hosts.listen())
            if name == STOP:
                hosts.is_taken = False
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

    def is_new(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Whether a call may have to be compiled: none of its sizes was made before."""
        leaves = jax.tree.leaves((list(arguments), dict(options)))
        key = (name, *(leaf.shape if hasattr(leaf, "shape") else leaf for leaf in leaves))
        if key in self._made:
            return False
        self._made.add(key)
        return True


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
