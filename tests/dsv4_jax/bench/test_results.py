"""What results files hold after several runs."""

import json
import sys

import pytest

from dsv4_jax.bench import compare, results


def read(path):
    return json.loads(path.read_text())


def test_a_row_replaces_that_of_its_op_and_shape_and_names_its_run(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"tests": {"passed": 3}}')
    first, second = (results.RowKeeper(path, command) for command in ("first", "second"))
    for op, shape in (("gather", "1 x 8"), ("gather", "8 x 8"), ("flush", "8 x 8")):
        first.keep(compare.row(op, shape, 10.0))
    second = results.RowKeeper(path, "second")
    second.keep(compare.row("gather", "8 x 8", 5.0))
    found = read(path)
    commands = {name: run["command"] for name, run in found["runs"].items()}
    assert [(commands[r["run"]], r["op"], r["shape"], r["ours_us"]) for r in found["rows"]] == [
        ("first", "gather", "1 x 8", 10.0),
        ("first", "flush", "8 x 8", 10.0),
        ("second", "gather", "8 x 8", 5.0),
    ]
    assert found["tests"] == {"passed": 3}
    assert all({"device", "jax", "date"} < set(run) for run in found["runs"].values())
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_without_rows_is_forgotten(tmp_path):
    path = tmp_path / "results.json"
    results.RowKeeper(path, "first").keep(compare.row("gather", "8 x 8", 10.0))
    results.RowKeeper(path, "second").keep(compare.row("gather", "8 x 8", 5.0))
    assert [run["command"] for run in read(path)["runs"].values()] == ["second"]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["results.json"], "results.json"),
        (["some/results.json", "--baseline", "/some/folder/"], "results.json --baseline folder"),
    ],
)
def test_a_command_line_names_no_folders(monkeypatch, arguments, command):
    spec = type("Spec", (), {"name": "benchmarks.bench_gather"})
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["/some/bench_gather.py", *arguments])
    assert results.command_line() == f"python -m benchmarks.bench_gather {command}"


def test_an_output_is_written_whole_with_each_figure(tmp_path):
    path = tmp_path / "out.json"
    output = results.Output(path, command="bench")
    output.set(rows=[1])
    assert read(path) == output.fields
    assert set(output.fields) == {"device", "jax", "date", "command", "rows"}
    assert list(path.parent.iterdir()) == [path]
    assert results.Output(None).fields["device"]
