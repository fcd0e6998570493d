"""The faults of `tools/planted_faults` fit the code; whether tests catch them, `mutations` says."""

import pathlib
import tomllib

import pytest

from tools import mutations

ROOT, MUTATIONS = mutations.ROOT, mutations.read_mutations()


def test_names_differ():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 24


def test_a_fault_stands_in_the_file_of_its_room():
    for path in mutations.FAULTS.glob("*.toml"):
        for fault in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            assert ".".join(pathlib.PurePath(fault["file"]).parts[:-1][:2]) == path.stem


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_fits_the_code(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    assert text.replace(mutation.old, mutation.new) != text
    assert all((ROOT / "tests" / test).exists() for test in mutation.tests)
