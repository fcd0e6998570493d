"""The table of known bugs in README.md: complete, and every test it names is there."""

import pathlib
import re

TESTS = pathlib.Path(__file__).parent
ROWS = dict(
    re.findall(r"^\| ([BC]\d+) \| [^|]+ \| (.+) \|$", (TESTS / "README.md").read_text(), re.M)
)


def test_every_bug_has_a_row():
    assert list(ROWS) == [f"B{i}" for i in range(1, 36)] + [f"C{i}" for i in range(1, 13)]


def test_every_row_names_a_test_that_is_there():
    for bug, cell in ROWS.items():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named, bug
        for file, name in named:
            source = (TESTS / file).read_text()
            assert re.search(rf"^(def|class) {name}\(|^{name} = ", source, re.M), (bug, file, name)
