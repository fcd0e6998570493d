"""The faults of `tools/mutations.py` still fit the code; whether tests catch them, it says."""

import pytest

from tools import mutations

ROOT = mutations.ROOT


def test_names_differ():
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names) >= 24


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_fits_the_code(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    assert text.replace(mutation.old, mutation.new) != text
    assert all((ROOT / "tests" / test).exists() for test in mutation.tests)
