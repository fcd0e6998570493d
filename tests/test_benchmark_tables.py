"""Kernel tables of the benchmarks are those of the results; the README's figures are there too."""

import itertools
import json
import pathlib
import re

import pytest

from benchmarks import tables
from tools import agents_picture, prompt_picture, round_picture, side_by_side_picture

README = pathlib.Path(__file__).parents[1] / "README.md"
ROW = {
    "op": "gather",
    "shape": "64 x 512",
    "ours_us": 18.04,
    "baseline": None,
    "baseline_us": None,
    "ratio": None,
    "roofline_share": 0.71,
}
BASELINE = {"baseline": "FlashMLA", "baseline_us": 45.5, "ratio": 0.4}
RUN = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-21", "command": "python -m a"}
TESTS = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-22", "passed": 12, "failed": 0}


@pytest.fixture(scope="module")
def results():
    return json.loads(tables.RESULTS.read_text())


def test_the_document_has_the_tables_of_the_results(results):
    document = tables.DOCUMENT.read_text()
    made = tables.tables(results)
    assert document == tables.splice(document, made), "run `python -m benchmarks.tables`"
    assert [line for line in made.splitlines() if line.startswith("| `")] == [
        tables.line(row)
        for name in results["runs"]
        for row in results["rows"]
        if row["run"] == name
    ]


def test_slower_calls_are_those_of_the_results(results):
    document = tables.SLOWER.read_text()
    assert document == tables.splice(document, tables.slower_table(results)), (
        "run `python -m benchmarks.tables`"
    )
    limits = (tables.ROOT / "docs" / "limits.md").read_text()
    found = tables.slower(results)
    (count, most) = re.search(
        r"Kernels:\*\* (\d+) of the measured calls are slower .*?, by up to ([\d.]+) times", limits
    ).groups()
    assert (int(count), most) == (len(found), f"{found[0][1]['ratio']:.2f}")


def test_which_calls_count_as_slower():
    def row(op, baseline, ratio, **more):
        return {"op": op, "baseline": baseline, "ratio": ratio, **more}

    rows = [
        row("a", "b", 1.004), row("c", None, None), row("d", "e", 1.02),
        row("f", "g", 0.9, rivals=[{"baseline": "h", "ratio": 1.5}]),
        row("block_linear w2", "DeepGEMM alone", 1.7), row("block_linear wo_a", "x alone", 2.0),
        row("block_linear_in_parts w2", "y", 1.1), row("i", "j", None, failed="ValueError"),
    ]  # fmt: skip
    found = tables.slower({"rows": rows})
    assert [(one["op"], other["baseline"]) for one, other in found] == [
        ("block_linear wo_a", "x alone"), ("f", "h"), ("d", "e"),
    ]  # fmt: skip


def test_every_row_is_of_a_known_run_and_every_run_has_rows(results):
    assert {row["run"] for row in results["rows"]} == set(results["runs"])
    assert len({(row["op"], row["shape"]) for row in results["rows"]}) == len(results["rows"])


def test_rows_of_two_runs_do_not_share_a_table():
    runs = {"a": RUN, "b": RUN | {"date": "2026-11-23", "command": "python -m b"}}
    rows = [
        ROW | {"run": run, "shape": shape} for run, shape in (("a", "1"), ("b", "2"), ("a", "3"))
    ]
    made = tables.tables({"tests": TESTS, "runs": runs, "rows": rows}).splitlines()
    first = made.index("NVIDIA H200, jax 0.11.2, 2026-11-21: `python -m a`")
    second = made.index("NVIDIA H200, jax 0.11.2, 2026-11-23: `python -m b`")
    shapes = [(i, line.split(" | ")[1]) for i, line in enumerate(made) if line.startswith("| `")]
    assert [shape for _, shape in shapes] == ["1", "3", "2"]
    assert first < shapes[0][0] < shapes[1][0] < second < shapes[2][0]
    assert made[1] == "12 GPU tests passed: NVIDIA H200, jax 0.11.2, 2026-11-22, `pytest -m gpu`."


def test_failed_tests_are_not_hidden():
    made = tables.tables({"tests": TESTS | {"failed": 2}, "runs": {}, "rows": []})
    assert "12 GPU tests passed, 2 failed: " in made


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (ROW, "| `gather` | 64 x 512 | 18.0 |  |  |  | 71% |"),
        (ROW | BASELINE, "| `gather` | 64 x 512 | 18.0 | FlashMLA | 45.5 | 0.40 | 71% |"),
        (
            ROW | {"baseline": "FlashMLA", "baseline_failed": "ValueError"},
            "| `gather` | 64 x 512 | 18.0 |  |  |  | 71% |",
        ),
    ],
    ids=["alone", "beside a baseline", "beside one that failed"],
)
def test_a_row_is_a_line(row, line):
    assert tables.line(row) == line


def test_further_baselines_stand_below_a_row():
    rivals = [
        {"baseline": "Marlin", "baseline_us": 36.08, "ratio": 0.5},
        {
            "baseline": "Humming",
            "baseline_us": None,
            "ratio": None,
            "baseline_failed": "ValueError",
        },
    ]
    lines = tables.table([ROW | BASELINE | {"rivals": rivals}, ROW])
    assert lines[3] == "|  |  |  | Marlin | 36.1 | 0.50 |  |"
    assert lines[4] == tables.line(ROW)


def test_a_row_that_failed_is_left_out():
    failed = ROW | {"run": "a", "ours_us": None, "failed": "ValueError"}
    made = tables.tables({"runs": {"a": RUN}, "rows": [failed, ROW | {"run": "a"}]})
    assert made.count("| `gather`") == 1


def test_only_the_text_between_the_markers_is_replaced():
    document = f"# a\n{tables.BEGIN}old\n{tables.END}\n## b\n"
    spliced = tables.splice(document, "new\n")
    assert spliced == document.replace("old", "new")
    assert tables.splice(spliced, "new\n") == spliced


ENGINES = tuple(side_by_side_picture.COLOURS)


def test_the_picture_of_rounds_is_that_of_their_table():
    points, plain_ms = round_picture.read_table(round_picture.DOCUMENT.read_text())
    assert [x for x, _, _ in points] == [1.0, 2.8, 3.9, 5.0]
    for _, tokens_s, times in points:  # both are of one run
        assert tokens_s * plain_ms / 1000 == pytest.approx(times, rel=0.02)
    made = round_picture.draw(points, plain_ms)
    assert round_picture.PICTURE.read_text() == made, "run `python -m tools.round_picture`"


def test_the_picture_of_policies_is_that_of_their_table():
    shares, policies = agents_picture.read_table(agents_picture.DOCUMENT.read_text())
    assert len(policies) == 4
    assert all(len(values) == len(shares) for values in policies.values())
    made = agents_picture.draw(shares, policies)
    assert agents_picture.PICTURE.read_text() == made, "run `python -m tools.agents_picture`"
    assert made.count("<circle") == 4 * len(shares)


def test_the_picture_of_prompts_is_that_of_their_table():
    points = prompt_picture.read_table(prompt_picture.DOCUMENT.read_text())
    assert [tokens for tokens, _, _ in points] == [8192, 32_768, 131_072, 1_048_576]
    for tokens, seconds, tokens_s in points:
        assert tokens / seconds == pytest.approx(tokens_s, rel=0.002)
    made = prompt_picture.draw(points)
    assert prompt_picture.PICTURE.read_text() == made, "run `python -m tools.prompt_picture`"
    places = [
        (float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', made)
    ]
    steps = [later[0] - sooner[0] for sooner, later in itertools.pairwise(places)]
    assert steps == pytest.approx(
        [steps[0], steps[0], 1.5 * steps[0]], abs=0.3
    )  # of 4, 4 and 8 times


def test_the_picture_of_engines_is_that_of_their_table():
    curves = side_by_side_picture.read_table(side_by_side_picture.DOCUMENT.read_text())
    assert {size for size, _ in curves} == side_by_side_picture.DASHES.keys()
    for size in side_by_side_picture.DASHES:
        loads = {engine: [load for load, _, _ in curves[size, engine]] for engine in ENGINES}
        assert loads["vLLM"] == loads["dsv4-jax"] == sorted(loads["vLLM"])
    made = side_by_side_picture.draw(curves)
    assert side_by_side_picture.PICTURE.read_text() == made, "run `tools.side_by_side_picture`"
    assert made.count("<circle") == sum(map(len, curves.values()))


def test_points_of_a_picture_stand_where_their_numbers_say():
    made = round_picture.draw([(1.0, 100, 0.5), (3.0, 300, 1.5)], 5.0)
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', made)
    (x1, y1), (x3, y3) = [(float(x), float(y)) for x, y in places]
    (plain,) = re.findall(r'y1="([\d.]+)" [^>]*stroke-dasharray', made)
    assert x3 - round_picture.PLOT.left == pytest.approx(
        3 * (x1 - round_picture.PLOT.left), abs=0.2
    )
    assert float(plain) == pytest.approx((y1 + y3) / 2, abs=0.1)  # 200 tokens a second
    assert y3 < y1


# What the README says of a step or a prompt, and the row of docs/benchmarks/ that has it.
FROM_DOCUMENT = {
    r"([\d,]+) tokens/s drawn for 1 request .* draws ([\d,]+) tokens/s": (
        "| 1, 8,192 + 1,024 | {1}, {0} |"
    ),
    r"([\d,]+) tokens/s for 8, .* and ([\d,]+) tokens/s, and with 32": (
        "| 8, 8,192 + 1,024 | {1}, {0} |"
    ),
    r"64 requests of 8,192 tokens, [^:]*: ([\d.]+) ms": "| 1x4 | 1, 8,192 | {0} (4.69 to 6.18) |",
    r"ms, ([\d.]+) ms and": "| 1x4 | 8, 8,192 | {0} (6.71 to 7.22) | 3.25 |",
    r"ms and ([\d.]+) ms": "| 1x4 | 64, 8,192 | {0} (18.57 to 18.83) | 12.52 |",
    r"16,384 tokens, `--model-shards 4`: ([\d.]+) ms a step, ([\d,]+) tokens/s": (
        "| 1x4 | 256, 16,384 | {0} (20.36 to 21.47) | 12.71 | {1} |"
    ),
    r"32,768 tokens: ([\d.]+) s, ([\d,]+) tokens/s": (
        "| 32,768 | 32,768 | uniform | {0} (1.548 to 1.553) | {1} |"
    ),
}


@pytest.mark.parametrize("what", FROM_DOCUMENT)
def test_a_figure_of_the_readme_occurs_in_the_document(what):
    (found,) = re.findall(what, README.read_text())
    row = FROM_DOCUMENT[what].format(*([found] if isinstance(found, str) else found))
    pages = [page.read_text() for page in tables.DOCUMENT.parent.glob("*.md")]
    assert any(row in page for page in pages), row


def test_all_figures_of_the_readme_are_among_these():
    table = README.read_text().split("## What runs where")[1].split("\n\n")[1]
    cells = [line.split("|")[6] for line in table.splitlines()[2:]]
    matched = {
        n
        for what in FROM_DOCUMENT
        for found in re.findall(what, table)
        for n in numbers(str(found))
    }
    said = {n for cell in cells for n in re.findall(r"([\d.,]*\d) (?:ms|s|tokens/s)\b", cell)}
    assert said == matched


def numbers(text):
    return re.findall(r"[\d][\d,]*(?:\.\d+)?", text)
