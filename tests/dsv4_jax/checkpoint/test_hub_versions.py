"""The tests of downloads and of the hub's cache, with the versions of its library at both ends."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from helpers import library_versions
from tools.check_library_versions import pin_oldest, read_requirements

ROOT = pathlib.Path(__file__).parents[3]
LIBRARY = "huggingface-hub"


def numbers(version):
    return [int(part) for part in version.split(".")]


@pytest.mark.slow
@pytest.mark.parametrize("which", library_versions.WHICH)
def test_the_oldest_and_the_newest_hub_pass(which, tmp_path):
    library_versions.install(LIBRARY, which, tmp_path)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), f"{ROOT}/tests"])
    }
    here = [sys.executable, "-c", "import huggingface_hub as hub; print(hub.__version__)"]
    found = subprocess.run(here, env=environment, capture_output=True, text=True, check=True)
    version = found.stdout.strip()
    if which == "oldest":
        assert f"{version}.".startswith(
            pin_oldest(read_requirements()[LIBRARY]).partition("==")[2] + "."
        )
    else:
        assert numbers(version) >= numbers(importlib.metadata.version(LIBRARY))
    tests = str(pathlib.Path(__file__).with_name("test_find.py"))
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
