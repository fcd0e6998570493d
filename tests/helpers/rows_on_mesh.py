"""Rows packed and unpacked on meshes of four CPU devices, as a program of its own.

    python -m helpers.rows_on_mesh [--kernel] data both

It prints, for each way in which pools lie, whether all bits are those of one device; `--kernel`
takes the kernels, in the interpreter.
"""

import contextlib
import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dsv4_jax as ds
import pallas_kernels as pk
from dsv4_jax.cache import packed_rows
from dsv4_jax.cache.row_sums import row_sums
from dsv4_jax.mesh import BY_BLOCK, BY_SLOT

NUM_PLACES = 8
WAYS = {
    "data": ((4, 1), BY_SLOT),
    "model": ((1, 4), BY_SLOT),
    "both": ((2, 2), BY_SLOT),
    "blocks split": ((2, 2), BY_BLOCK),
    "one device": ((1, 1), BY_SLOT),
}


def main():
    names, context = sys.argv[1:], contextlib.nullcontext()
    if names[0] == "--kernel":
        for op in (pk.pack_rows, pk.unpack_rows):
            of_kernel = functools.partial(op, backend="triton_gpu")
            mock.patch.object(packed_rows.pk, op.__name__, of_kernel).start()
        names, context = names[1:], pk.gpu_interpreter()
    with context:
        for name in names:
            print(f"{name}: {'same' if is_same(*WAYS[name]) else 'others'}")


def is_same(sizes, spec):
    """Rows of all shards, and some that are none, to other places of all shards."""
    pools, other = draw(0), draw(1)
    sharding = NamedSharding(ds.make_mesh(*sizes), spec)
    rows, places = np.int32([6, 0, -1, 3, 5]), np.int32([1, -1, 4, 7, 2])
    packed, sums = packed_rows.pack_rows(jax.device_put(pools, sharding), rows)
    wanted = np.stack([pack(pools, row) for row in rows])
    replicated = jax.device_put(wanted, NamedSharding(sharding.mesh, P()))
    given = [replicated, wanted] if spec == BY_SLOT else [replicated]
    same = [np.array_equal(packed, wanted), packed.is_fully_replicated]
    same.append(np.array_equal(row_sums(jnp.asarray(wanted)), sums))
    for each in given:
        before = jax.device_put(other, sharding)
        after = packed_rows.unpack_rows(before, places, each)
        assert all(leaf.is_deleted() for leaf in before.values()), "a pool is in memory twice"
        for name, leaf in after.items():
            same.append(leaf.sharding == sharding)
            expected = other[name].copy()
            for row, place in zip(rows, places, strict=True):
                if place >= 0:
                    expected[:, place] = pools[name][:, row] if row >= 0 else 0
            same.append(np.asarray(leaf).tobytes() == expected.tobytes())
    return all(same)


def draw(seed):
    rng = np.random.default_rng(seed)
    return {
        "codes": rng.integers(0, 256, (3, NUM_PLACES, 2, 8), np.uint8),
        "tail": rng.normal(size=(2, NUM_PLACES, 3)).astype(np.float32),
    }


def pack(pools, row):
    if row < 0:
        return np.zeros(packed_rows.row_bytes(pools), np.uint8)
    data = b"".join(layer[row].tobytes() for plane in pools.values() for layer in plane)
    return np.frombuffer(data, np.uint8)


if __name__ == "__main__":
    main()
