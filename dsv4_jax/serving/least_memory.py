"""What memory the hosts of a mesh have free, of which all processes must know the same."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import socket

from dsv4_jax.hosts import Hosts
from dsv4_jax.runtime import Memory


def least_memory(hosts: Hosts, memory: Memory | None) -> Memory | None:
    """The part of a process, where that is least; every process calls this and gets the same.

    Processes of one machine share what it has free. None if one of them does not know.

    Args:
      hosts: the processes.
      memory: of this one.
    """
    machines = hosts.share(_machine())
    own = memory or Memory("", -1, -1)
    free = hosts.share(own.free_bytes)
    totals = hosts.share(own.total_bytes)
    if min(free) < 0:
        return None
    parts = [one // machines.count(its) for one, its in zip(free, machines, strict=True)]
    process = parts.index(min(parts))
    name = f"the machine of process {process}, for each of its processes,"
    return Memory(name, parts[process], totals[process], is_host=True)


def _machine() -> int:
    """The same in all processes of a machine, or of a container that has a name of its own."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
