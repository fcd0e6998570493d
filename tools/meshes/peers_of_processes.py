"""Peer buffers of a mesh of 2x2 CPU devices in two processes.

    python -m tools.meshes.peers_of_processes

CPUs have no memory to share by a driver: that of a stand-in is NumPy's, and an address that another
process opens ends in 1. Each process prints what it gathers and the addresses in its headers, as
JSON.
"""

import json
import os
import subprocess
import sys

import jax
import numpy as np

from helpers import gpu_processes
from pallas_kernels.peer_collectives.buffer import EMPTY
from tools.meshes.harness import environment_of


def obstacle_of(call, *arguments):
    """What keeps an axis from having buffers; None if nothing does."""
    from dsv4_jax import peers

    try:
        call(*arguments)
    except peers._ObstacleError as error:
        return str(error)
    return None


def refuse(shared, ordinal):
    """In place of `open_shared`, where the driver refuses."""
    raise RuntimeError("error 999")


def be_one(number, count, port):
    """One of the processes."""
    import dsv4_jax as ds
    from dsv4_jax import peer_memory, peers
    from helpers import host_memory

    ds.hosts.join_hosts(f"127.0.0.1:{port}", count, number)
    mesh = ds.make_mesh(2, 2)
    devices = list(mesh.devices.flat)
    told = peers._tell_all(mesh, lambda d: b"%d of %d" % (devices.index(d), number))
    result = {
        "hosts": len(set(peers._hosts(mesh).values())),
        "told": [text.decode() for text in told.values()],
        "obstacle": obstacle_of(peers._raise_of_any_process, mesh, "too far" if number else None),
        "none": obstacle_of(peers._raise_of_any_process, mesh, None),
    }
    for axis in mesh.axis_names:
        buffers = host_memory.allocate(mesh, axis)
        for part in buffers.addressable_shards:
            words = np.asarray(part.data)[0][:64].view(np.uint64)
            result[f"{axis} {devices.index(part.device)}"] = [int(word) for word in words[:4]]
            result["new"] = bool(np.all(part.data[0, -1024:] == EMPTY))
    if number:
        peer_memory.open_shared = refuse
    result["refused"] = obstacle_of(peers._allocate, mesh, "data")
    result["within"] = obstacle_of(peers._allocate, mesh, "model")
    jax.effects_barrier()
    print(json.dumps(result), flush=True)


def run():
    """What each process printed."""
    environment = os.environ | environment_of(2)
    command = [sys.executable, "-m", "tools.meshes.peers_of_processes"]
    options = {"env": environment, "stdout": subprocess.PIPE}
    processes = gpu_processes.start(command, 2, gpus=0, **options)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_one(*map(int, sys.argv[1:]))
    else:
        print(json.dumps(run()))
