"""Pages say what is; what was stands in the change log."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SAYINGS = re.compile(
    r"script (?:of \w+ )?that is not (?:part of|in) (?:this|the) repository"
    r"|earlier (?:that|the same) day",
    re.IGNORECASE,
)
"""A figure that nobody can repeat, and a run told by what came before it."""
HEADING = re.compile(r"^#+ .*before and after", re.IGNORECASE | re.MULTILINE)
"""A section of old times."""


def history_in(text):
    return SAYINGS.findall(" ".join(text.split())) + HEADING.findall(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_tells_no_history(page):
    assert history_in(page.read_text()) == []


def test_history_is_seen():
    text = "## Few rows, before and after\n7.6 us by a script that is\nnot in the repository,\n"
    assert len(history_in(text + "and 7.9 earlier that day")) == 3
    assert history_in("Before a step and after it, the day is the same.") == []
