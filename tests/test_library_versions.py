"""The job that tries the oldest and the newest libraries: what it takes, and what it says."""

import pytest

from tools import check_library_versions as job
from tools.check_library_versions import BOUNDARIES, ROOT, Outcome, pin_oldest, read_requirements


def test_every_library_that_the_packages_need_has_tests():
    needed = read_requirements(("serve",))
    assert needed.keys() <= BOUNDARIES.keys()
    assert BOUNDARIES.keys() <= read_requirements().keys()
    for paths in BOUNDARIES.values():
        for path in paths:
            assert (ROOT / "tests" / path).exists(), path


@pytest.mark.parametrize(
    ("requirement", "pinned"),
    [
        ("starlette>=0.46", "starlette==0.46"),
        ("jax>=0.11.1,<0.13", "jax==0.11.1"),
        ("uvloop>=0.21; sys_platform != 'win32'", "uvloop==0.21; sys_platform != 'win32'"),
        ("some-name[extra] <3, >= 2.0", "some-name==2.0"),
    ],
)
def test_the_oldest_version_is_the_lower_bound(requirement, pinned):
    assert pin_oldest(requirement) == pinned


@pytest.mark.parametrize("requirement", ["starlette", "starlette<1"])
def test_a_requirement_has_a_lower_bound(requirement):
    with pytest.raises(ValueError, match="must have a lower bound"):
        pin_oldest(requirement)


def test_what_pip_cannot_install_is_named():
    """Also after a remark about versions for other Pythons, and without the versions there are."""
    told = (
        "WARNING: Location 'x' is ignored\n"
        "ERROR: Ignored the following versions that require a different python version: 1.21.2\n"
        "ERROR: Could not find a version that satisfies the requirement a==0.6 (from versions: 1)\n"
        "ERROR: No matching distribution found for a==0.6\n"
    )
    reason = "ERROR: Could not find a version that satisfies the requirement a==0.6"
    assert job.find_reason(told) == reason
    assert job.find_reason("killed\n") == "killed"
    assert job.find_reason("") == "pip ended without a word"


def test_where_the_oldest_cannot_be_installed_none_is_tried_alone(monkeypatch, tmp_path):
    made = []

    class Environment:
        def __init__(self, folder, requirements):
            made.append(folder.name)

        def test(self, library):
            return Outcome("", "ERROR: ResolutionImpossible")

    monkeypatch.setattr(job, "Environment", Environment)
    job.check(["openai", "tqdm"], tmp_path)
    assert made == ["oldest", "newest"]


def test_what_broke_is_said_and_counted(monkeypatch, capsys, tmp_path):
    """`openai` is too old, `anthropic` fails for its sake alone, `tqdm` has a newer release."""
    problems = {
        ("oldest", "openai"): "test_a",
        ("old-openai", "openai"): "test_a",
        ("oldest", "anthropic"): "test_b",
        ("newest", "tqdm"): "test_c",
    }

    class Environment:
        def __init__(self, folder, requirements):
            self.name, self.requirements = folder.name, requirements

        def test(self, library):
            (version,) = (line for line in self.requirements if line.startswith(library))
            return Outcome(version.removeprefix(library), problems.get((self.name, library), ""))

    monkeypatch.setattr(job, "Environment", Environment)
    monkeypatch.setattr(
        job, "read_requirements", lambda: {name: f"{name}>=1" for name in BOUNDARIES}
    )
    only = ["openai", "anthropic", "tqdm", "starlette"]
    assert job.main(["--keep", str(tmp_path), "--only", *only]) == 3
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "library oldest newest",
        "openai ==1 BROKE >=1 passed",
        "among the oldest: test_a",
        "the oldest, beside the newest of others: test_a",
        "anthropic ==1 BROKE >=1 passed",
        "among the oldest: test_b",
        "the oldest, beside the newest of others: passed, so that a bound of another library is "
        "untrue",
        "tqdm ==1 passed >=1 BROKE",
        "among the newest: test_c",
        "starlette ==1 passed >=1 passed",
    ]
