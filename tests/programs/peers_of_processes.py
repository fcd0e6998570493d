"""Peer buffers of a mesh of 2x2 CPU devices in two processes.

    python -m programs.peers_of_processes

CPUs have no memory to share by a driver: a stand-in hands addresses on as they are, and one that is
opened ends in 1. Each process prints what it gathers and the addresses in its headers, as JSON.
"""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np

from programs.mesh_check import ENVIRONMENT, TESTS


def be_one(number, port):
    """One of the processes."""
    import dsv4_jax as ds
    from dsv4_jax import peer_memory, peers

    ds.hosts.join_hosts(f"127.0.0.1:{port}", 2, number)
    peer_memory.share = lambda at, gpu: at.to_bytes(peer_memory.SHARED_BYTES, "little")
    peer_memory.open_shared = lambda shared, gpu: int.from_bytes(shared, "little") | 1
    mesh = ds.make_mesh(2, 2)
    devices = list(mesh.devices.flat)
    told = peers._tell_all(mesh, lambda d: b"%d of %d" % (devices.index(d), number))
    result = {
        "hosts": len(set(peers._hosts(mesh).values())),
        "told": [text.decode() for text in told.values()],
        "obstacle": peers._of_any_process(mesh, "too far" if number else None),
        "none": peers._of_any_process(mesh, None),
    }
    for axis in mesh.axis_names:
        buffers = peers._allocate(mesh, axis)
        for part in buffers.addressable_shards:
            words = np.asarray(part.data)[0][:64].view(np.uint64)
            own = part.data.unsafe_buffer_pointer()
            place = devices.index(part.device)
            result[f"{axis} {place}"] = [int(word) for word in (own, *words[:4])]
    jax.effects_barrier()
    print(json.dumps(result), flush=True)


def run():
    """What each process printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    flags = ENVIRONMENT["XLA_FLAGS"].replace("count=8", "count=2")
    environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "programs.peers_of_processes"]
    processes = [
        subprocess.Popen([*command, str(i), str(port)], env=environment, stdout=subprocess.PIPE)
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_one(*map(int, sys.argv[1:]))
    else:
        print(json.dumps(run()))
