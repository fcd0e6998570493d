"""A checkpoint that is loaded onto meshes.

By mesh, leaves that differ from those loaded on one device or lie elsewhere than `param_shardings`
says. With `--memory` it loads onto the first mesh alone and says the bytes of this process's
devices, of the largest stack and tensor, and by how much private memory grew. `--process I N PORT`
makes it one of N processes, of 8 / N devices each.
"""

import gc
import pathlib
import threading
import time

import jax
import numpy as np

import dsv4_jax as ds
from tools.meshes.harness import mesh_of


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


def compare(folder, meshes):
    """{mesh: names of leaves that differ or lie elsewhere}."""
    config, expected = ds.load_checkpoint(folder, progress=False)
    wrong = {}
    for name in meshes:
        mesh = mesh_of(name)
        _, params = ds.load_checkpoint(folder, mesh=mesh, progress=False)
        shardings = ds.param_shardings(config, mesh, expected)
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        wrong[name] = [
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


def measure(folder, mesh):
    """Bytes, as above."""
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


def add_arguments(parser):
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("meshes", nargs="+", metavar="DATAxMODEL")
    parser.add_argument("--memory", action="store_true", help="bytes, of the first mesh alone")
    parser.add_argument("--process", type=int, nargs=3, help="be one: number, how many, port")


def check_all(arguments):
    if arguments.process:
        number, count, port = arguments.process
        ds.hosts.join_hosts(f"127.0.0.1:{port}", count, number)
    if arguments.memory:
        return measure(arguments.folder, mesh_of(arguments.meshes[0]))
    return compare(arguments.folder, arguments.meshes)
