"""Writes the kernel tables of docs/benchmarks/: `python -m benchmarks.tables`.

They are made from tests/data/gpu_results.json: one table for each run in kernels.md, and in
slower_kernels.md the calls that another project's kernel serves faster.
"""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks" / "kernels.md"
SLOWER = DOCUMENT.with_name("slower_kernels.md")
RESULTS = ROOT / "tests" / "data" / "gpu_results.json"
BEGIN = "<!-- kernel tables: made by benchmarks/tables.py -->\n"
END = "<!-- end -->\n"
_HEAD = ["op", "shape", "ours, us", "baseline", "baseline, us", "ratio", "share of the roofline"]


def main():
    results = json.loads(RESULTS.read_text())
    for document, made in ((DOCUMENT, tables(results)), (SLOWER, slower_table(results))):
        document.write_text(splice(document.read_text(), made))


def tables(results):
    """Markdown: the outcome of the GPU tests, then a heading and a table for each run."""
    parts = [_tests(results["tests"])] if "tests" in results else []
    for name, run in results["runs"].items():
        rows = [row for row in results["rows"] if row["run"] == name and "failed" not in row]
        heading = f"## {_ops(rows)} (run {name})"
        parts.append("\n".join([heading, "", _described(run), "", *table(rows)]))
    return "\n" + "\n\n".join(parts) + "\n\n"


def table(rows):
    """The lines of a table."""
    lines = [text for row in rows for text in (line(row), *rival_lines(row))]
    return [_line(_HEAD), _line(["---"] * len(_HEAD)), *lines]


def rival_lines(row):
    """Lines of a row's further baselines, which stand below it; one that failed is left out."""
    return [
        _line(["", "", "", *_times(rival), ""])
        for rival in row.get("rivals", ())
        if rival["baseline_us"] is not None
    ]


def line(row):
    """A row of the results as a line of a table; a baseline that failed is not named."""
    share = row["roofline_share"]
    return _line(
        [
            f"`{row['op']}`",
            row["shape"],
            _number(row["ours_us"], 1),
            *_times(row),
            "" if share is None else f"{share:.0%}",
        ]
    )


def _times(row):
    """The cells of a baseline."""
    name = "" if row["baseline_us"] is None else row["baseline"]
    return [name, _number(row["baseline_us"], 1), _number(row["ratio"], 2)]


def slower(results):
    """(row, baseline) of calls that are slower than a baseline for the same work, worst first.

    A product that is given rounded rows does not do the same work as one that rounds them; only of
    `wo_a`, whose rows ours does not round, there is no other. Sums that a model leaves in parts are
    rows of their own in kernels.md.
    """
    found = [
        (row, baseline)
        for row in results["rows"]
        if "failed" not in row and not row["op"].startswith("block_linear_in_parts")
        for baseline in (row, *row.get("rivals", ()))
        if baseline["ratio"] is not None and round(baseline["ratio"], 2) > 1
        if "alone" not in baseline["baseline"] or "wo_a" in row["op"]
    ]
    return sorted(found, key=lambda pair: -pair[1]["ratio"])


def slower_table(results):
    """Markdown: the table of `slower`."""
    head = ["op", "shape", "ours, us", "baseline", "baseline, us", "ratio", "run"]
    lines = [
        _line(
            [f"`{row['op']}`", row["shape"], _number(row["ours_us"], 1), *_times(one), row["run"]]
        )
        for row, one in slower(results)
    ]
    return "\n" + "\n".join([_line(head), _line(["---"] * len(head)), *lines]) + "\n\n"


def splice(document, text):
    """The document with the text between its markers."""
    before, rest = document.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END, 1)[1]


def _tests(tests):
    counts = f"{tests['passed']} GPU tests passed"
    if tests["failed"]:
        counts += f", {tests['failed']} failed"
    return f"{counts}: {tests['device']}, jax {tests['jax']}, {tests['date']}, `pytest -m gpu`."


def _described(run):
    return f"{run['device']}, jax {run['jax']}, {run['date']}: `{run['command']}`"


def _ops(rows):
    """The ops of a run, each once and without its variants."""
    return ", ".join(dict.fromkeys(row["op"].split()[0] for row in rows))


def _number(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


def _line(cells):
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
