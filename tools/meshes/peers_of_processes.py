"""Peer buffers of a mesh of 2x2 CPU devices in two processes.

CPUs have no memory to share by a driver: that of a stand-in is NumPy's, and an address that another
process opens ends in 1. Each process says what it gathers and the addresses in its headers.
"""

import json

import jax
import numpy as np

from pallas_kernels.peer_collectives.buffer import EMPTY
from tools.meshes.harness import start_processes


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


def be_one(arguments):
    """One of the processes."""
    number, count, port = arguments.process
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


def run(count=2):
    """What each process printed."""
    processes = start_processes("peers", count, devices=4)
    ended = [process.communicate(timeout=120) for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(err[-4000:] for _, err in ended))
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def check_all(arguments):
    return run(arguments.count)
