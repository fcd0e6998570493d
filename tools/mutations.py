"""Plants one fault at a time and runs the tests of its room, of which one has to fail.

    python -m tools.mutations --list
    python -m tools.mutations                             all of them, about half an hour
    python -m tools.mutations --only commit_counts sink   some
    python -m tools.mutations --only kernel_              those whose names begin so

Each fault is an edit of one line in a temporary copy of the tree; `planted_faults/` has them, a
file for each room. The default tests run first, and those marked slow only where all of them pass.
A fault is caught if a test fails; if none does it survives, and the exit status is 1. It is 1 too
if the tests can't be collected: then they say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FAULTS = pathlib.Path(__file__).parent / "planted_faults"
ALL_PASSED, NONE_CHOSEN = "survived", "no test was chosen"
LEFT_OUT = (".git", ".venv", "build", "__pycache__", "*.egg-info", ".pytest_cache", ".hypothesis")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
      name: what the command line calls it.
      file: path from the root of the repository.
      old: text that occurs in the file once.
      new: what takes its place.
      tests: files or folders below `tests/`, of which some test has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutations() -> list[Mutation]:
    """All faults; those of a room of the packages stand in its file."""
    return [
        Mutation(**{**fields, "tests": tuple(fields["tests"])})
        for path in sorted(FAULTS.glob("*.toml"))
        for fields in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    ]


def apply(mutation: Mutation, root: pathlib.Path) -> None:
    """Makes the edit in a copy of the tree.

    Raises:
      ValueError: the old text does not occur exactly once.
    """
    file = root / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} must hold {mutation.old!r} once")
    file.write_text(text.replace(mutation.old, mutation.new))


def judge(mutation: Mutation) -> tuple[bool, str]:
    """Runs the tests on a mutated copy: whether it is caught, and by which test or why not."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        apply(mutation, root)
        caught, why = _run_tests(root, mutation.tests, "not bench and not slow")
        if not caught and why in (ALL_PASSED, NONE_CHOSEN):
            caught, why = _run_tests(root, mutation.tests, "not bench and slow")
    return caught, why


def _run_tests(root: pathlib.Path, tests: tuple[str, ...], markers: str) -> tuple[bool, str]:
    """Whether one of these tests fails in that tree, and which, or what came out instead."""
    paths = os.pathsep.join([str(root), str(root / "tests")])
    files = [str(root / "tests" / test) for test in tests]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            markers,
            *files,
        ],
        cwd=root,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode == pytest.ExitCode.TESTS_FAILED and failed:
        return True, failed[1]
    verdicts = {pytest.ExitCode.OK: ALL_PASSED, pytest.ExitCode.NO_TESTS_COLLECTED: NONE_CHOSEN}
    said = f"no verdict: {(done.stdout + done.stderr).strip()[-500:]}"
    return False, verdicts.get(done.returncode, said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names, or how they begin")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    begin = tuple(arguments.only or [""])
    chosen = [mutation for mutation in read_mutations() if mutation.name.startswith(begin)]
    if not chosen:
        parser.error(f"no such mutation: {', '.join(begin)}")
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.name:44} {mutation.file:52} {' '.join(mutation.tests)}")
        return 0
    survivors = 0
    for mutation in chosen:
        start = time.perf_counter()
        caught, why = judge(mutation)
        survivors += not caught
        seconds = time.perf_counter() - start
        print(f"{'caught' if caught else 'SURVIVED':9}{mutation.name:40}{seconds:5.0f} s  {why}")
        sys.stdout.flush()
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
