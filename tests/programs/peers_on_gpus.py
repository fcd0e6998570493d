"""Whether kernels of peer buffers give the bits of the references, on all GPUs that are there.

    python -m programs.peers_on_gpus [--calls 40]

On each mesh of all GPUs, calls of random sizes follow each other through the same buffers, each
with random values, NaN and EMPTY among them, and each device sleeps at random before some of them.
Prints a JSON object: {mesh: {op: numbers that differ, of so many}}.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import dsv4_jax as ds
from dsv4_jax.mesh import BY_DEVICE, DATA, MODEL
from dsv4_jax.peers import make_peer_buffers, own_buffer, using
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


def run(mesh, axis, peers, name, given, spin):
    """What the kernel and the reference give, on every device."""

    def both(x, spin, peers):
        # A device that spins longer reaches the exchange later.
        steps = jax.lax.fori_loop(0, spin[0], lambda i, y: y * 1.0001 + i, jnp.float32(1))
        x = jnp.where(steps < 0, 0, x[0])
        more = {"plus": x[::-1]} if name == "all_reduce" else {}
        with using(peers):
            ours = OPS[name](x, axis, **more, buffer=own_buffer(axis), backend="triton_gpu")
        return ours[None], OPS[name](x, axis, **more, backend="reference")[None]

    spec = BY_DEVICE
    call = jax.shard_map(
        both, mesh=mesh, in_specs=(spec, spec, spec), out_specs=(spec, spec), check_vma=False
    )
    return jax.jit(call)(given, spin, peers)


def differing(found, expected):
    """How many numbers differ; a NaN is like any other."""
    found, expected = (np.asarray(jax.device_get(x), np.float32) for x in (found, expected))
    return int(np.sum((found != expected) & ~(np.isnan(found) & np.isnan(expected))))


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
        given = jax.device_put(values(rng, shape, dtype), where)
        spin = jax.device_put(rng.choice([0, 0, 3000], mesh.size).astype(np.int32), where)
        found, expected = run(mesh, axis, peers, name, given, spin)
        row = results.setdefault(f"{axis} {name}", [0, 0])
        row[0] += differing(found, expected)
        row[1] += found.size
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=40)
    args = parser.parse_args()
    ds.set_xla_flags()
    devices, results = len(jax.devices()), {}
    for data in range(1, devices + 1):
        if devices % data == 0:
            model = devices // data
            results[f"{data}x{model}"] = check_mesh(data, model, args.calls)
    print(json.dumps(results))
    return int(any(row[0] for mesh in results.values() for row in mesh.values()))


if __name__ == "__main__":
    raise SystemExit(main())
