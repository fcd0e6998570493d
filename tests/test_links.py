"""Links between documents lead to a file that is there, and to a heading that it has.

And a file that a document names by its folder is in the repository.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(p for f in ("docs", "examples", "tests") for p in ROOT.glob(f"{f}/**/*.md")),
    ]
)
FOLDERS = (
    "dsv4_jax",
    "pallas_kernels",
    "tests",
    "benchmarks",
    "tools",
    "docs",
    "examples",
    "notebooks",
    "findings",
)
PATHS = "".join(
    f"/{path.relative_to(ROOT).as_posix()}\n"
    for folder in FOLDERS
    for path in ROOT.glob(f"{folder}/**/*.*")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:\w+/)+\w+\.(?:py|md|json|ipynb))`")
OF_OTHERS = {"CHANGELOG.md", "deepseek_v4.md", "known_bugs.md", "original_cache.md"}
"""Documents that name files of other projects, or of other versions."""
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


def absent(text):
    """Files that a text names by their folders, from any folder on, and that are nowhere."""
    for name in NAMED.findall(text):
        if f"/{name}\n" not in PATHS:
            yield name


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name not in OF_OTHERS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_that_a_document_names_are_there(path):
    assert list(absent(path.read_text())) == []


def test_a_file_that_is_not_there_is_seen():
    text = "`step/draws.py`, `dsv4_jax/step/draws.py`, `step/draw.py`, `raws.py`, `tep/draws.py`"
    assert list(absent(text)) == ["step/draw.py", "tep/draws.py"]
