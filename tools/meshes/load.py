"""Loads a checkpoint onto meshes of eight CPU devices: `... tools.meshes.load FOLDER 4x2`.

Prints, as JSON and by mesh, leaves that differ from those loaded on one device or lie elsewhere
than `param_shardings` says. With `--memory` it loads onto the first mesh alone and prints the bytes
of this process's devices, of the largest stack and tensor, and by how much private memory grew.
`--process I N PORT` makes it one of N processes, of 8 / N devices each.
"""

import argparse
import gc
import json
import os
import pathlib
import threading
import time


def private_bytes():
    """Memory of this process that is not mapped from files."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most private bytes while it is open, beyond those before."""

    def __enter__(self):
        self._before, self.grown, self._ended = private_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *raised):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        while not self._ended.is_set():
            self.grown = max(self.grown, private_bytes() - self._before)
            time.sleep(0.002)


def compare(ds, folder, sizes):
    import jax
    import numpy as np

    config, expected = ds.load_checkpoint(folder, progress=False)
    wrong = {}
    for data, model in sizes:
        mesh = ds.make_mesh(data, model)
        _, params = ds.load_checkpoint(folder, mesh=mesh, progress=False)
        shardings = ds.param_shardings(config, mesh, expected)
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        wrong[f"{data}x{model}"] = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for (path, found), one, sharding in zip(
                jax.tree.leaves_with_path(params),
                jax.tree.leaves(expected),
                jax.tree.leaves(shardings),
                strict=True,
            )
            if found.dtype != one.dtype
            or np.asarray(found).tobytes() != np.asarray(one).tobytes()
            or not found.sharding.is_equivalent_to(sharding, found.ndim)
        ]
    return wrong


def measure(ds, folder, data, model):
    import jax
    import numpy as np

    mesh = ds.make_mesh(data, model)
    ds.load_checkpoint(folder, mesh=mesh, progress=False)  # programs are compiled
    gc.collect()
    with Peak() as peak:
        _, params = ds.load_checkpoint(folder, mesh=mesh, progress=False)
    parts = [
        shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
    ]
    return {
        "all": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "own": sum(parts),
        "largest_part": max(parts),
        "grown": peak.grown,
        "zeros": int(sum(not np.asarray(s.data).any() for s in params.embed.addressable_shards)),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("meshes", nargs="+")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--process", type=int, nargs=3, default=(0, 1, 0))
    args = parser.parse_args()
    number, count, port = args.process
    flag = f"--xla_force_host_platform_device_count={8 // count}"
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=flag)
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    import dsv4_jax as ds

    sizes = [tuple(map(int, mesh.split("x"))) for mesh in args.meshes]
    if args.memory:
        print(json.dumps(measure(ds, args.folder, *sizes[0])))
    else:
        print(json.dumps(compare(ds, args.folder, sizes)))


if __name__ == "__main__":
    main()
