"""What a kernel's page measured says where and how, and its letters are explained."""

import json
import re

import pytest

from benchmarks import tables

PAGES = sorted((tables.ROOT / "docs" / "kernels").glob("*.md"))
NEEDED = {
    "device": r"\bH[12]00",
    "jax": r"\bjax 0\.\d+\.\d+|\bjax 0\.12\b",
    "date": r"\b20\d\d-\d\d-\d\d\b",
    "command": r"(?:dsv4-jax|python -m|pytest) |\[the command|the command (?:of|above)|\[profile\]",
}


def sections(text, title):
    """A section, and each of its subsections after what the section begins with, by heading."""
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        if section.startswith(f"## {title}\n"):
            first, *rest = re.split(r"^(?=### )", section, flags=re.MULTILINE)
            yield f"## {title}", first
            for part in rest:
                yield part.partition("\n")[0], first.partition("\n| ")[0] + part


def unsaid(text):
    """What a page does not say of the tables that it calls measured."""
    return [
        (heading, what)
        for heading, part in sections(text, "Measured")
        if "\n| " in part
        for what, pattern in NEEDED.items()
        if not re.search(pattern, part)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_tables_say_device_jax_date_and_command(page):
    assert unsaid(page.read_text()) == []


def test_a_table_without_its_run_is_seen():
    table = "## Measured\n\nNVIDIA H200, jax 0.11.2\n\n| a | us |\n|---|---|\n| b | 3 |\n"
    assert unsaid(table) == [("## Measured", "date"), ("## Measured", "command")]
    assert unsaid(table.replace("0.11.2", "0.11.2, 2026-11-23: `python -m a`")) == []


def test_rows_of_ops_are_those_of_the_results():
    results = json.loads(tables.RESULTS.read_text())["rows"]
    rows = {f"| `{row['op']}` | {row['shape']} |": tables.line(row) for row in results}
    seen = 0
    for page in PAGES:
        for line in page.read_text().splitlines():
            start = re.match(r"\| `[^`]*` \| [^|]* \|", line)
            if start is None or start[0] not in rows:
                continue
            own, made = (
                [cell.strip() for cell in text.replace(" %", "%").strip("|").split("|")]
                for text in (line, rows[start[0]])
            )
            if len(own) == 4:  # no baseline was measured for this op
                own = [*own[:3], "", "", "", own[3]]
            assert own == made, page.name
            seen += 1
    assert seen > 100


def unexplained(text):
    """Capital letters by which code of a page names sizes, and which its prose does not explain."""
    text = re.sub(r"^```\w+\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # commands
    code = re.compile(r"^```\n.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
    found = re.findall(r"(?<![\w.-])[A-Z]{1,2}(?![\w/(-])", " ".join(code.findall(text)))
    prose = " ".join(code.sub(" ", text).split())
    return sorted({n for n in found if not re.search(rf"\b{n} [a-z]", prose)})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_letters_of_sizes_are_explained(page):
    assert unexplained(page.read_text()) == []


def test_a_letter_without_a_word_is_seen():
    assert unexplained("The grid is `[T, H]` for T tokens.\n\n```sh\na B\n```\n") == ["H"]
