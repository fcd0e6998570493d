"""What `pyproject.toml` installs: versions that work together."""

import pathlib
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())
RELEASES = {
    "jax": ("0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1", "0.13.0"),
    "jax-triton": ("0.3.0", "0.3.1", "0.4.0", "0.4.1", "0.5.0"),
    "triton": ("3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0"),
}
"""Releases there are, and a next one."""


def allowed(requirements, name):
    """Releases of a package that all requirements on it allow."""
    specifiers = [one.specifier for one in map(Requirement, requirements) if one.name == name]
    return [v for v in RELEASES[name] if all(Version(v) in one for one in specifiers)]


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_extras_for_gpus_bring_what_was_seen_to_work_together(extra):
    """Not jax 0.12: it is slower on GPUs, and jax-triton 0.4 cannot jit on it.

    jax 0.11.1 has no `inline_ptx`, which `select_top_k` is made of. jax-triton 0.4 finds no NVIDIA
    in Triton 3.6; PTX of Triton 3.9 has version 9.4, for CUDA 13.4 or newer.
    """
    project = PROJECT["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"][extra]]
    assert allowed(requirements, "jax") == ["0.11.2"]
    assert allowed(requirements, "jax-triton") == ["0.4.0", "0.4.1"]
    assert allowed(requirements, "triton") == ["3.7.0", "3.7.1", "3.8.0"]
    extras = [set(Requirement(one).extras) for one in requirements if Requirement(one).extras]
    assert extras == [{extra}]


def test_the_package_itself_runs_on_more():
    """On a CPU, and compiled for a GPU that is not there."""
    project = PROJECT["project"]
    assert allowed(project["dependencies"], "jax") == ["0.11.1", "0.11.2", "0.12.0", "0.12.0.1"]
    aot = [*project["dependencies"], *project["optional-dependencies"]["aot"]]
    assert allowed(aot, "jax") == ["0.11.2", "0.12.0", "0.12.0.1"]
