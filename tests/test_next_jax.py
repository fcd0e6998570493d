"""Which jax `tools.next_jax` takes, and what it says; no index is asked."""

import pytest
from packaging.version import Version

from tools import next_jax

SAID = """jax (0.12.0.1)
Available versions: 0.12.1.dev20261128, 0.12.0.1, 0.12.0, not a version, 0.11.2
  INSTALLED: 0.12.0.1
"""


def versions(*texts):
    return [Version(text) for text in texts]


def test_versions_are_read():
    expected = versions("0.12.1.dev20261128", "0.12.0.1", "0.12.0", "0.11.2")
    assert next_jax.parse_versions(SAID) == expected
    assert next_jax.parse_versions("ERROR: No matching distribution found for jax") == []


@pytest.mark.parametrize(
    ("of_jax", "of_jaxlib", "newest"),
    [
        (("0.12.0", "0.9.2"), ("0.9.2", "0.12.0"), "0.12.0"),  # not by their letters
        (("0.12.1rc1", "0.12.0"), ("0.12.1rc1", "0.12.0"), "0.12.1rc1"),
        (
            ("0.12.1.dev20261129", "0.12.1.dev20261128"),
            ("0.12.1.dev20261128",),
            "0.12.1.dev20261128",
        ),
        (("0.12.1", "0.12.1rc1"), ("0.12.1", "0.12.1rc1"), "0.12.1"),
    ],
)
def test_the_newest_that_all_have_is_taken(of_jax, of_jaxlib, newest):
    available = {"jax": versions(*of_jax), "jaxlib": versions(*of_jaxlib)}
    assert next_jax.choose_version(available) == Version(newest)


def test_packages_without_a_common_version_are_refused():
    available = {"jax": versions("0.12.1"), "jaxlib": []}
    with pytest.raises(
        ValueError, match=r"version in common, got \{'jax': '0.12.1', 'jaxlib': 'none'"
    ):
        next_jax.choose_version(available)


def test_the_table_says_what_broke():
    error = "NotImplementedError: kernel has sort"
    cases = [{"case": "a"}, {"case": "b", "error": f"{error}\nmore"}, {"case": "c", "error": error}]
    head, counts, said = next_jax.tabulate({("sm_90a", "ptx"): cases})
    assert head.split() == ["target", "lowering", "lowered", "broke"]
    assert counts.split() == ["sm_90a", "ptx", "1", "2"]
    assert said.strip() == f"b and 1 more: {error}"


def test_what_compilers_print_beside_the_cases_is_passed_over(tmp_path):
    said = ["ptxas info    : Used 83 registers", "{ a module }", '{"case": "a"}']
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said) + "exit 3\n")
    python.chmod(0o755)
    ended = {"case": "the run", "error": "ended with 3"}
    assert next_jax.lower(python, "sm_90a", "ptx", []) == [{"case": "a"}, ended]
