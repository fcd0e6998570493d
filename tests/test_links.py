"""Every link between documents leads to a file that is there, and to a heading that it has."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests/README.md"])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


def broken(path):
    """The links of a document that lead nowhere."""
    for target in LINK.findall(CODE.sub("", path.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if not other.exists() or (anchor and anchor not in anchors(other)):
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert list(broken(path)) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    document = tmp_path / "a.md"
    document.write_text("# One, `two`\n[a](#one-two) [b](#three) [c](b.md) [d](https://x.org/#y)\n")
    assert list(broken(document)) == ["#three", "b.md"]
