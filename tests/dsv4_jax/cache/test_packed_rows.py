"""Rows of pools on meshes; on one device see `serving/test_hand_over.py` and the op's tests."""

import contextlib
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import dsv4_jax as ds
import pallas_kernels as pk
from dsv4_jax.cache.packed_rows import pack_rows, row_bytes, unpack_rows
from helpers import rows_on_mesh
from pallas_kernels.pack_rows import triton_gpu

TESTS = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["both"],
        pytest.param(["data", "model", "blocks split", "one device"], marks=pytest.mark.slow),
        pytest.param(["--kernel", "both", "blocks split"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_rows_on_a_mesh_have_the_bits_that_they_have_on_one_device(names):
    """Of four devices; each leaves its own places as they were, and copies no pool."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.rows_on_mesh", *names],
        env=os.environ | flags | {"PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ways = [name for name in names if name in rows_on_mesh.WAYS]
    assert done.stdout.splitlines() == [f"{name}: same" for name in ways]


def test_the_mesh_s_cases_see_rows_of_another_shard(monkeypatch):
    """Here on the one device of this process."""
    name = "one device"
    assert rows_on_mesh.is_same(*rows_on_mesh.WAYS[name])
    good = rows_on_mesh.pack
    monkeypatch.setattr(rows_on_mesh, "pack", lambda pools, row: good(pools, row ^ 1))
    assert not rows_on_mesh.is_same(*rows_on_mesh.WAYS[name])


@pytest.mark.parametrize("name", ["flash", "pro", "v41_flash"])
def test_rows_of_every_released_model_are_words_that_the_kernels_move(name):
    """In all of its cache formats."""
    config, served = getattr(ds.DSV4Config, name)(), 0
    for cache_format in pk.CACHE_FORMATS:
        sizes = {"max_requests": 4, "max_context_tokens": 1024, "cache_format": cache_format}
        with contextlib.suppress(NotImplementedError):  # of index keys that V4.1 does not rotate
            cache = ds.cache.cache_shapes(config, **sizes)
            for pools in (cache.state, cache.paged):
                planes = jax.tree.leaves(pools)
                assert triton_gpu.find_obstacle(planes) is None
                assert len({plane.shape[1] for plane in planes}) == 1
            served += 1
    assert served >= 3


def test_no_planes_are_rows_of_no_bytes():
    packed, sums = pack_rows({}, np.int32([0, 1]))
    assert not np.any(sums)
    assert packed.shape == (2, row_bytes({})) == (2, 0)
    assert unpack_rows({}, np.int32([0, 1]), packed) == {}


def test_arguments_of_another_shape_are_refused():
    pools = {"codes": jax.numpy.zeros((1, 2, 8), np.uint8)}
    with pytest.raises(ValueError, match="rows must be an array"):
        pack_rows(pools, np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="packed must be an array"):
        unpack_rows(pools, np.int32([0]), np.zeros((1, 4), np.uint8))
    assert not pools["codes"].is_deleted()
