"""Peer buffers on CPU devices, which have no kernels for them.

Whether each header has the addresses of its axis and the rest is as new, which collectives of a
step are given a buffer, and how many logits differ from those without them.
"""

import collections
import dataclasses

import jax
import numpy as np

import dsv4_jax as ds
from dsv4_jax import collectives, peers
from dsv4_jax.cache.snapshots import init_snapshot_store
from dsv4_jax.step.serve_step import jit_serve_step
from helpers import host_memory
from pallas_kernels.peer_collectives.buffer import EMPTY, PeerLayout
from tools.meshes.harness import ROWS, Runner, smallest

MESH = (2, 4)


def check_headers(mesh, axis):
    """Whether every device's buffer is as `buffer.py` has it."""
    buffers, layout = host_memory.allocate(mesh, axis), PeerLayout(mesh.shape[axis])
    words = {part.device: np.asarray(part.data)[0] for part in buffers.addressable_shards}
    at = {device: int(own[:2].view(np.uint64)[0]) for device, own in words.items()}
    good = []
    for part in buffers.addressable_shards:
        place = np.argwhere(mesh.devices == part.device)[0]
        line = mesh.devices[place[0]] if axis == "model" else mesh.devices[:, place[1]]
        own = words[part.device]
        header = layout.header(list(line).index(part.device), [at[peer] for peer in line])
        good.append(
            np.array_equal(own[: len(header)], header)
            and not own[len(header) : layout.first_slot_word].any()
            and bool((own[layout.first_slot_word :] == EMPTY).all())
        )
    return good


def count_buffers(run):
    """{collective and axis: [calls with a buffer, calls without]} of what `run` traces."""
    counts, plain = collections.defaultdict(lambda: [0, 0]), {}

    def counted(name):
        def call(*arguments, buffer=None, **options):
            axis = options.get("axis_name") or arguments[1]
            counts[f"{name} {axis}"][buffer is None] += 1
            return plain[name](*arguments, buffer=buffer, **options)

        return call

    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        plain[name] = getattr(collectives, name)
        setattr(collectives, name, counted(name))
    try:
        found = run()
    finally:
        for name, function in plain.items():
            setattr(collectives, name, function)
    return found, counts


def check_all(arguments):
    mesh, config = ds.make_mesh(*MESH), smallest()
    buffers = {axis: host_memory.allocate(mesh, axis) for axis in mesh.axis_names}
    result = {axis: check_headers(mesh, axis) for axis in mesh.axis_names}
    params = ds.init_params(config, jax.random.key(0))
    logits = []
    for attached in (None, peers.PeerBuffers(**buffers)):
        jax.clear_caches()
        runner = Runner(config, params, mesh)
        runner.params = dataclasses.replace(runner.params, peers=attached)

        found, counts = count_buffers(lambda runner=runner: runner.decode(list(range(ROWS))))
        logits.append(found)
        result["with" if attached else "without"] = counts
    result["differ"] = int(np.sum(logits[0] != logits[1]))
    result["with drafts"] = count_with_drafts(mesh, peers.PeerBuffers(**buffers))
    return result


def count_with_drafts(mesh, buffers):
    """`count_buffers` of the engine's step with drafts, which is traced and not run."""
    config = dataclasses.replace(smallest(), num_mtp_layers=1)
    runner = Runner(config, ds.init_params(config, jax.random.key(0)), mesh)
    params = dataclasses.replace(runner.params, peers=buffers)
    store = runner.place(init_snapshot_store(runner.cache, runner.shards))
    given = runner.serve_input([[3]] * ROWS, [1] * ROWS, ds.make_sampling(ROWS).completed())
    static = {"config": config, "draft_tokens": 2}
    jax.clear_caches()
    _, counts = count_buffers(
        lambda: jit_serve_step.trace(params, runner.cache, store, given, **static)
    )
    return counts
