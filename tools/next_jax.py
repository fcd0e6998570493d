"""Lowers every kernel with the newest jax that there is, pre-releases and nightlies among them.

    python -m tools.next_jax                                  what pip's index has
    python -m tools.next_jax --index-url URL                  another one, such as that of nightlies
    python -m tools.next_jax --only write_streams --target sm_90a

It makes an environment by `venv` and `pip`, in a temporary folder or in that of `--keep`, with the
newest version that jax, jaxlib and the compiler for GPUs all have, beside the project's other
requirements. There `tools.lower_all` lowers the cases by Pallas's Triton backend, and one case of
each kernel by each other lowering whose packages could be installed, without a GPU. The table at
the end says how many cases were lowered and what broke, and the exit status is 1 if anything did.
jax's installation guide names the index of nightlies.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Mapping, Sequence

from packaging.version import InvalidVersion, Version

from tools import aot
from tools.check_library_versions import ROOT, find_reason, read_requirements

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""All of one version; the compiler for GPUs comes without CUDA's libraries."""
LOWERINGS: Mapping[str, Sequence[str]] = {
    "pallas": (),
    "ptx": ("triton",),
    "ir": ("triton",),
    "jax_triton": ("triton", "jax-triton"),
}
"""Packages that a lowering needs beside jax."""


def parse_versions(said: str) -> list[Version]:
    """The versions that `pip index versions` lists; what is no version is left out.

    `parse_versions("jax (0.12.1)\\nAvailable versions: 0.12.1, 0.12.0")` gives both.
    """
    found = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    versions = []
    for text in found[1].split(",") if found else ():
        try:
            versions.append(Version(text.strip()))
        except InvalidVersion:
            continue
    return versions


def choose_version(available: Mapping[str, Iterable[Version]]) -> Version:
    """The newest version that all packages have, whatever stage it is in.

    Raises:
      ValueError: they have no version in common.
    """
    common = set.intersection(*(set(versions) for versions in available.values()))
    if not common:
        newest = {name: str(max(versions, default="none")) for name, versions in available.items()}
        raise ValueError(f"packages must have a version in common, got {newest} as the newest")
    return max(common)


def tabulate(results: Mapping[tuple[str, str], Sequence[Mapping[str, str]]]) -> list[str]:
    """A line for each target and lowering, and one for each kind of error below it."""
    lines = [f"{'target':10} {'lowering':12} lowered  broke"]
    for (target, lowering), cases in results.items():
        errors: dict[str, list[str]] = {}
        for case in cases:
            if "error" in case:
                errors.setdefault(case["error"].splitlines()[0][:160], []).append(case["case"])
        broken = sum(map(len, errors.values()))
        lines.append(f"{target:10} {lowering:12} {len(cases) - broken:7}  {broken:5}")
        for error, names in errors.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"    {names[0]}{others}: {error}")
    return lines


def install(folder: pathlib.Path, pip_options: Sequence[str]) -> tuple[pathlib.Path, list[str]]:
    """Makes the environment; its Python, and the lowerings that can be tried in it."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "pip", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    available = {}
    for name in PACKAGES:
        listed = pip("index", "versions", "--pre", name, *pip_options)
        if listed.returncode:
            raise RuntimeError(f"pip finds no {name}: {find_reason(listed.stderr)}")
        available[name] = parse_versions(listed.stdout)
    version = choose_version(available)
    print(f"jax {version}", flush=True)
    others = [line for name, line in read_requirements().items() if name not in PACKAGES]
    pinned = [f"{name}=={version}" for name in PACKAGES]
    made = pip("install", "--quiet", "--pre", *pip_options, *pinned)
    if not made.returncode:
        made = pip("install", "--quiet", *others, "nvidia-cuda-nvcc>=13", *pinned)
    if made.returncode:
        raise RuntimeError(f"pip cannot install jax {version}: {find_reason(made.stderr)}")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["cuda13"]
    has = {}
    for name in ("triton", "jax-triton"):
        [wanted] = [line for line in extras if re.match(rf"{name}[<>=]", line)]
        has[name] = pip("install", "--quiet", "--no-deps", wanted)
        if has[name].returncode:
            print(f"without {name}: {find_reason(has[name].stderr)}")
    usable = [
        lowering
        for lowering, needed in LOWERINGS.items()
        if not any(has[name].returncode for name in needed)
    ]
    return python, usable


def lower(python: pathlib.Path, target: str, lowering: str, names: Sequence[str]) -> list[dict]:
    """What `tools.lower_all` says of each case."""
    command = [str(python), "-m", "tools.lower_all", target, "--lowering", lowering]
    if lowering != "pallas":
        command.append("--once")  # Triton's own part of a kernel takes seconds
    command += ["--only", *names] if names else []
    done = subprocess.run(
        command, cwd=ROOT, env=aot.environment(), stdout=subprocess.PIPE, text=True
    )
    print(f"{target} {lowering} ended with {done.returncode}", flush=True)
    # Compilers print there too, and some of their lines begin with a brace.
    lines = done.stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"case"')]
    if done.returncode and not any("error" in case for case in found):
        found.append({"case": "the run", "error": f"ended with {done.returncode}"})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; gives whether anything broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index-url", metavar="URL")
    parser.add_argument("--target", choices=aot.TARGETS, nargs="*", default=[*aot.TARGETS])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--keep", metavar="FOLDER", type=pathlib.Path)
    given = parser.parse_args(arguments)
    options = ["--index-url", given.index_url] if given.index_url else []
    with tempfile.TemporaryDirectory() as temporary:
        python, lowerings = install(given.keep or pathlib.Path(temporary) / "venv", options)
        results = {
            (target, lowering): lower(python, target, lowering, given.only)
            for target in given.target
            for lowering in lowerings
        }
    print("\n".join(tabulate(results)))
    return int(any("error" in case for cases in results.values() for case in cases))


if __name__ == "__main__":
    sys.exit(main())
