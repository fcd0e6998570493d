"""A library in a version of its own, for processes that a test starts."""

import json
import subprocess
import sys

import pytest

from tools.check_library_versions import pin_oldest, read_requirements

WHICH = ("oldest", "newest")
UNREACHED = ("from versions: none", "onnection", "timed out", "Temporary failure")
"""What pip says where no index of packages answers."""


def install(library, which, folder):
    """Puts the oldest or newest allowed version and what it needs into a folder of packages.

    Nothing is put there where the newest is what this process has. Skips the test where no index
    of packages can be asked.
    """
    required = read_requirements()[library]
    if which == "oldest":
        required = pin_oldest(required)
    elif not json.loads(_pip("--dry-run", "--report", "-", "--upgrade", required))["install"]:
        return
    _pip("--target", str(folder), "--no-compile", required)


def _pip(*arguments):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout",
               "15", "--disable-pip-version-check", *arguments]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    if done.returncode and any(text in done.stderr for text in UNREACHED):
        pytest.skip(f"no index of packages can be asked: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout
