"""Writes the README's table from the last GPU run: `python -m benchmarks.readme_table`."""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "tests" / "data" / "gpu_results.json"
BEGIN = "<!-- made by tests/benchmarks/readme_table.py -->\n"
END = "<!-- end -->\n"
_HEAD = ["op", "shape", "ours, us", "rival", "rival, us", "ratio", "share of the limit"]


def table(results):
    """Markdown: what ran, and a line for each row that was measured."""
    counts = results["tests"]
    tests = f"{counts['passed']} GPU tests passed"
    if counts["failed"]:
        tests += f", {counts['failed']} failed"
    lines = [
        f"{results['device']}, jax {results['jax']}, {results['date']}; {tests}.",
        "",
        _line(_HEAD),
        _line(["---"] * len(_HEAD)),
        *(_line(_cells(row)) for row in results["rows"] if "failed" not in row),
    ]
    return "\n".join(lines) + "\n"


def splice(readme, text):
    """The README with the text between its markers."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END, 1)[1]


def main():
    README.write_text(splice(README.read_text(), table(json.loads(RESULTS.read_text()))))


def _cells(row):
    share = row["limit_share"]
    return [
        f"`{row['op']}`",
        row["shape"],
        _number(row["ours_us"], 1),
        "" if row["rival_us"] is None else row["rival"],
        _number(row["rival_us"], 1),
        _number(row["ratio"], 2),
        "" if share is None else f"{share:.0%}",
    ]


def _number(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


def _line(cells):
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
