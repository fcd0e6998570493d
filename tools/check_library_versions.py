"""Runs the tests at the boundary to each library with its oldest and its newest allowed version.

    python tools/check_library_versions.py                         # every library, before a release
    python tools/check_library_versions.py --only starlette flax   # some, after a bound has changed

The bounds are those of `pyproject.toml`. Two environments are made by `venv` and `pip`: in one
every library below has the oldest version that its bound allows, in the other what `pip` takes
today. What breaks among the oldest is tried once more where that library alone is old, which says
whether its own bound is untrue or that of another. The table at the end says what broke, and the
exit status is how many libraries did. A bound that is untrue is raised to the lowest version that
passes.

The environments are of the Python that runs this script; `--keep` names a folder in which another
run finds them again. On two cores a run of all takes about half an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ("serve", "test")
NOT_NEEDED = ("dsv4-jax", "ipykernel", "matplotlib", "nbclient", "nbformat", "pyright", "ruff")
"""Requirements of the extras that no test below uses."""

_CLIENTS = ("dsv4_jax/serve/test_clients.py",)
_SERVER = ("dsv4_jax/serve/test_faults.py", "dsv4_jax/serve/test_requests.py", *_CLIENTS)
_NUMBERS = ("pallas_kernels/common/test_numbers.py", "pallas_kernels/common/test_formats.py")
_FILES = ("dsv4_jax/checkpoint/test_outside_files.py", "dsv4_jax/checkpoint/test_save.py")

BOUNDARIES: Mapping[str, Sequence[str]] = {
    "huggingface-hub": ("dsv4_jax/checkpoint/test_find.py",),
    "tokenizers": ("dsv4_jax/serving/requests/test_text.py", _FILES[0]),
    "safetensors": _FILES,
    "deepseek-recipe": _SERVER,
    "llguidance": ("dsv4_jax/serving/test_grammars.py", "dsv4_jax/serve/test_constraints.py"),
    "starlette": _SERVER,
    "uvicorn": _SERVER,
    "httptools": _SERVER,
    "uvloop": _SERVER,
    "openai": (*_CLIENTS, "dsv4_jax/serve/test_constraints.py"),
    "anthropic": _CLIENTS,
    "prometheus-client": ("dsv4_jax/serving/metrics/test_metrics.py",),
    "tqdm": ("dsv4_jax/test_progress.py", "dsv4_jax/checkpoint/test_find.py"),
    "jax": ("dsv4_jax/test_compat.py", "dsv4_jax/cache", *_NUMBERS),
    "flax": ("dsv4_jax/cache", *_FILES),
    "ml-dtypes": _NUMBERS,
    "numpy": (*_NUMBERS, *_FILES),
    "scipy": ("dsv4_jax/research/test_intervals.py",),
}
"""Tests of each library, in `tests/`."""

TEST_TIMEOUT_S = 1800.0
"""Of one file or folder; what waits for ever is broken too."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a library's tests in one environment.

    Attributes:
      version: of the library; "" where the environment could not be made.
      problem: what failed, by name; "" if nothing did.
    """

    version: str
    problem: str


class Environment:
    """A virtual environment, made when it is first asked for, and what its tests gave."""

    def __init__(self, folder: pathlib.Path, requirements: Sequence[str]) -> None:
        """Takes what is installed.

        Args:
          folder: where it lies; one that is there already is taken as it is.
          requirements: what `pip` installs.
        """
        self._folder, self._requirements = folder, requirements
        self._python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        self._versions: dict[str, str] = {}
        self._problem: str | None = None
        self._results: dict[str, str] = {}

    def test(self, library: str) -> Outcome:
        """Runs the tests of a library; a file that two libraries share runs once."""
        if self._problem is None:
            self._problem = self._make()
        if self._problem:
            return Outcome("", self._problem)
        for path in BOUNDARIES[library]:
            if path not in self._results:
                self._results[path] = self._run(path)
        problems = [self._results[path] for path in BOUNDARIES[library] if self._results[path]]
        return Outcome(self._versions[_plain(library)], "; ".join(problems))

    def _make(self) -> str:
        """Makes it, and gives what `pip` says where it cannot be made."""
        done = self._folder / "installed"
        if not done.exists():
            print(f"making {self._folder}", file=sys.stderr)
            venv.create(self._folder, with_pip=True, clear=True)
            made = self._pip("install", "--quiet", *self._requirements)
            if made.returncode:
                return find_reason(made.stderr)
            done.touch()
        listed = json.loads(self._pip("list", "--format=json").stdout)
        self._versions = {_plain(item["name"]): item["version"] for item in listed}
        return ""

    def _pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._python), "-m", "pip", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    def _run(self, path: str) -> str:
        """What failed in a file or folder of tests."""
        print(f"{self._folder.name}: {path}", file=sys.stderr)
        command = [str(self._python), "-m", "pytest", "-q", "--no-header", "--tb=line", "-rfE",
                   "-p", "no:cacheprovider", f"tests/{path}"]  # fmt: skip
        try:
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"{path} does not end"
        if ended.returncode == 0:
            return ""
        failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", ended.stdout, re.MULTILINE)
        others = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        return ", ".join(failed[:3]) + others or f"{path} ends with {ended.returncode}"


def read_requirements(extras: Sequence[str] = EXTRAS) -> dict[str, str]:
    """The requirements of `pyproject.toml` by name, those of the extras with them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    by_name = {re.split(r"[\[<>=!~; ]", line)[0]: line for line in lines}
    return {name: line for name, line in by_name.items() if name not in NOT_NEEDED}


def pin_oldest(requirement: str) -> str:
    """The requirement of the oldest version that another one allows.

    `pin_oldest("starlette>=0.46") == "starlette==0.46"`

    Raises:
      ValueError: the requirement has no lower bound.
    """
    found = re.match(r"([\w.-]+)(?:\[[^]]*\])?[^;]*?>=\s*([\w.]+)[^;]*(;.*)?", requirement)
    if not found:
        raise ValueError(f"a requirement must have a lower bound (>=), got {requirement!r}")
    name, version, marker = found.groups()
    return f"{name}=={version}{marker or ''}"


def find_reason(stderr: str) -> str:
    """What `pip` says first of why it has failed, without its remarks and its long lists."""
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("ERROR:") and "Ignored the" not in line]
    return (errors or lines or ["pip ended without a word"])[0].partition(" (from")[0]


def check(libraries: Sequence[str], folder: pathlib.Path) -> dict[str, tuple[Outcome, ...]]:
    """Runs the tests of libraries among the oldest, among the newest and, if need be, alone.

    Where the oldest cannot be installed together, `pip` has said which bound to mend first, and
    none is tried alone.

    Args:
      libraries: names in `BOUNDARIES`.
      folder: where the environments lie.

    Returns:
      The outcomes of each library: oldest, newest, and that of the oldest alone where it failed.
    """
    requirements = read_requirements()
    oldest = {name: pin_oldest(requirements[name]) for name in BOUNDARIES}
    among_oldest = Environment(folder / "oldest", [*(requirements | oldest).values()])
    among_newest = Environment(folder / "newest", [*requirements.values()])
    outcomes = {}
    for library in libraries:
        found = [among_oldest.test(library), among_newest.test(library)]
        if found[0].problem and found[0].version:
            pinned = requirements | {library: oldest[library]}
            found.append(Environment(folder / f"old-{library}", [*pinned.values()]).test(library))
        outcomes[library] = tuple(found)
    return outcomes


def write_table(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """The lines of the table: versions, and under a library that broke what did."""
    lines = [f"{'library':18} {'oldest':24} {'newest':24}"]
    for library, found in outcomes.items():
        cells = [f"{it.version} {'BROKE' if it.problem else 'passed'}".strip() for it in found]
        lines.append(f"{library:18} {cells[0]:24} {cells[1]:24}".rstrip())
        kinds = ("among the oldest", "among the newest", "the oldest, beside the newest of others")
        for kind, outcome in zip(kinds, found, strict=False):
            if outcome.problem:
                lines.append(f"    {kind}: {outcome.problem}")
            elif kind == kinds[2]:
                lines.append(f"    {kind}: passed, so that a bound of another library is untrue")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; gives how many libraries broke."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="The exit status is how many libraries broke.",
    )
    parser.add_argument("--only", nargs="+", choices=BOUNDARIES, default=[*BOUNDARIES])
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="of environments")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="library-versions-") as made:
        outcomes = check(given.only, (given.keep or pathlib.Path(made)).absolute())
    print("\n".join(write_table(outcomes)))
    return sum(any(outcome.problem for outcome in found) for found in outcomes.values())


def _plain(name: str) -> str:
    """The name of a distribution as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
