"""Whether kernels of peer buffers give the bits of the references, on all GPUs that are there.

On each mesh of all GPUs, calls of random sizes follow each other through the same buffers, each
with random values, NaN and EMPTY among them, and each device sleeps at random before some of them.
Prints a JSON object: {mesh: {op: numbers that differ, of so many}}. Of several processes, each has
its share of the GPUs, and process 0 prints.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import dsv4_jax as ds
from dsv4_jax.mesh import BY_DEVICE, DATA, MODEL, fetch
from dsv4_jax.peers import make_peer_buffers, own_buffer, using
from helpers import gpu_processes
from pallas_kernels.common.pending import SplitSums
from pallas_kernels.peer_collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from pallas_kernels.peer_collectives.buffer import EMPTY

OPS = {op.__name__: op for op in (all_reduce, reduce_scatter, all_gather, all_to_all)}
SIZES = (8, 1024, 1032, 4096, 4120, 64 * 4096, 60 * 7168, 128 * 4096, 256 * 4096)


def values(rng, shape, dtype):
    """Values of many magnitudes, some NaN, and pairs that are EMPTY."""
    found = (rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, shape)).astype(dtype)
    words = found.reshape(-1).view(np.uint32)
    words[rng.integers(0, len(words), 3)] = [EMPTY, EMPTY, 0x7FC07FC0]
    return found


def count_differing(mesh, axis, peers, name, given, spin):
    """How many numbers of the kernel's are not the reference's, on all devices; a NaN is a NaN."""

    def both(x, spin, peers):
        # A device that spins longer reaches the exchange later.
        steps = jax.lax.fori_loop(0, spin[0], lambda i, y: y * 1.0001 + i, jnp.float32(1))
        x = jnp.where(steps < 0, 0, x[0])
        found = []
        for backend in ("triton_gpu", "reference"):
            with using(peers):
                options = {"buffer": own_buffer(axis), "backend": backend}
            if name == "all_gather":  # beside some elements of another dtype
                few = jnp.arange(2, dtype=jnp.int32)  # no whole lines
                given = (few, x.reshape(2, -1)) if backend == "triton_gpu" else (x,)
                *_, every = all_gather(*given, axis_name=axis, **options)
                found.append(every.reshape(-1))
            elif name == "all_reduce":
                parts = x.astype(jnp.float32)[None] * jnp.float32([[1], [0.3], [-1e-3]])
                found.append(all_reduce(SplitSums(parts, x.dtype), axis, plus=x[::-1], **options))
            else:
                found.append(OPS[name](x, axis, **options))
        ours, wanted = found
        differ = (ours != wanted) & ~(jnp.isnan(ours) & jnp.isnan(wanted))
        return jnp.stack([jnp.sum(differ), differ.size])[None]

    spec = BY_DEVICE
    call = jax.shard_map(
        both, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )
    return fetch(jax.jit(call)(given, spin, peers)).sum(axis=0)


def check_mesh(data, model, calls):
    """{axis and op: [numbers that differ, numbers]}."""
    mesh, rng = ds.make_mesh(data, model), np.random.default_rng(0)
    peers, results = make_peer_buffers(mesh), {}
    assert peers is not None
    for _ in range(calls):
        axis = str(rng.choice([a for a in (DATA, MODEL) if mesh.shape[a] > 1]))
        name, size = str(rng.choice(list(OPS))), int(rng.choice(SIZES))
        wide = name == "all_to_all" or (name == "all_gather" and rng.random() < 0.5)
        dtype, size = (jnp.float32, size // 2) if wide else (jnp.bfloat16, size)
        parts = [mesh.shape[axis]] if name in ("reduce_scatter", "all_to_all") else []
        shape = (mesh.size, *parts, size)
        where = NamedSharding(mesh, BY_DEVICE)
        given = values(rng, shape, dtype), rng.choice([0, 0, 3000], mesh.size).astype(np.int32)
        given = [jax.make_array_from_callback(x.shape, where, x.__getitem__) for x in given]
        row = results.setdefault(f"{axis} {name}", np.zeros(2, int))
        row += count_differing(mesh, axis, peers, name, *given)
    return {name: row.tolist() for name, row in results.items()}


def add_arguments(parser):
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, nargs=3, help="be one: number, how many, port")


def check_all(args):
    """The exit status."""
    if args.processes > 1 and not args.process:
        command = [sys.executable, "-m", "tools.meshes.on_gpus", *sys.argv[1:], "--process"]
        started = gpu_processes.start(command, args.processes)
        return int(any([process.wait() for process in started]))
    ds.set_xla_flags()
    number = 0
    if args.process:
        number, count, port = args.process
        ds.hosts.join_hosts(f"127.0.0.1:{port}", count, number)
    devices, results = len(jax.devices()), {}
    for data in range(1, devices + 1):
        if devices % data == 0:
            model = devices // data
            results[f"{data}x{model}"] = check_mesh(data, model, args.calls)
    if not number:
        print(json.dumps(results))
    return int(any(row[0] for mesh in results.values() for row in mesh.values()))
