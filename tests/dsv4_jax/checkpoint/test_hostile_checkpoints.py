"""Checkpoints with files that are changed at random are refused, or loaded as what they are."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(0, 40), (1000, 1000)])
def test_every_one_is_refused_or_loaded_within_its_time_and_memory(tmp_path, seed, count):
    done = subprocess.run(
        [sys.executable, "-m", "helpers.hostile_checkpoints", str(seed), str(count), str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
    )
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-3000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts.values()) == count
    assert counts["refused"] > counts["loaded"] > 0
