"""A plugin of pytest: engines of `helpers.serving` are on two data shards, twice as large.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 \
        pytest -p tools.meshes.two_shards tests/dsv4_jax/serving/test_drafting.py

`run` does so in a process of its own, for the number of devices is set before JAX starts.
"""

import os
import subprocess
import sys

from tools.meshes.harness import TESTS, environment_of

COUNTED = ("max_requests", "num_blocks", "num_snapshots")
"""Sizes of all data shards together."""
engines = []


def pytest_configure(config):
    import dsv4_jax as ds
    from helpers import serving

    mesh, make = ds.make_mesh(data=2), serving.make_engine

    def make_on_mesh(**changes):
        sizes = serving.SIZES | changes
        engines.append(1)
        return make(**changes | {n: 2 * sizes[n] for n in COUNTED if n in sizes}, mesh=mesh)

    serving.make_engine = make_on_mesh


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{len(engines)} engines were on two data shards")


def run(*tests):
    """What pytest says of these tests, and its status."""
    options = (
        "-q",
        "-m",
        "slow or not slow",
        "-p",
        "no:cacheprovider",
        "-p",
        "tools.meshes.two_shards",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=TESTS.parent,
        env=os.environ | environment_of(2),
        capture_output=True,
        text=True,
    )
    return done.stdout, done.returncode
