"""Peer buffers on eight CPU devices, which have no kernels for them.

    python -m programs.peers_check

Prints a JSON object: whether each header has the addresses of its axis and the rest is as new,
which collectives of a step are given a buffer, and how many logits differ from those without them.
"""

import collections
import dataclasses
import json

import jax
import numpy as np

import dsv4_jax as ds
from dsv4_jax import collectives, peers
from pallas_kernels.peer_collectives.buffer import EMPTY, PeerLayout
from programs.mesh_check import Runner, run_program, smallest

MESH = (2, 4)


def check_headers(mesh, axis):
    """Whether every device's buffer is as `buffer.py` has it."""
    buffers, layout = peers._allocate(mesh, axis), PeerLayout(mesh.shape[axis])
    at = {part.device: part.data.unsafe_buffer_pointer() for part in buffers.addressable_shards}
    good = []
    for part in buffers.addressable_shards:
        place = np.argwhere(mesh.devices == part.device)[0]
        line = mesh.devices[place[0]] if axis == "model" else mesh.devices[:, place[1]]
        words = np.asarray(part.data)[0]
        header = layout.header(list(line).index(part.device), [at[peer] for peer in line])
        good.append(
            np.array_equal(words[: len(header)], header)
            and not words[len(header) : layout.first_slot_word].any()
            and bool((words[layout.first_slot_word :] == EMPTY).all())
        )
    return good


def count_buffers(run):
    """{collective and axis: [calls with a buffer, calls without]} of what `run` traces."""
    counts, plain = collections.defaultdict(lambda: [0, 0]), {}

    def counted(name):
        def call(x, axis, *, buffer=None, **options):
            counts[f"{name} {axis}"][buffer is None] += 1
            return plain[name](x, axis, buffer=buffer, **options)

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


def check():
    """What is printed."""
    mesh, config = ds.make_mesh(*MESH), smallest()
    result = {axis: check_headers(mesh, axis) for axis in mesh.axis_names}
    params = ds.init_params(config, jax.random.key(0))
    prompts = [np.arange(1, 6) + 7 * row for row in range(8)]
    logits = []
    for attached in (None, {axis: peers._allocate(mesh, axis) for axis in mesh.axis_names}):
        jax.clear_caches()
        runner = Runner(config, params, mesh)
        if attached is not None:
            found = peers.PeerBuffers(**attached)
            runner.params = dataclasses.replace(runner.params, peers=found)

        def run(runner=runner):
            return [*runner.prefill(prompts), runner.decode([3] * len(prompts))]

        found, counts = count_buffers(run)
        logits.append(np.concatenate(found))
        result["with" if attached else "without"] = counts
    result["differ"] = int(np.sum(logits[0] != logits[1]))
    return result


def run():
    """What the program prints."""
    return run_program("peers_check")


if __name__ == "__main__":
    print(json.dumps(check()))
