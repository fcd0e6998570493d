"""`dsv4-jax evaluate` and `sweep`: tables, comparisons, files that go on, and what is refused."""

import dataclasses
import importlib
import json
import re
import sys

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cli import evaluate, main
from dsv4_jax.progress import Progress
from dsv4_jax.research import Idea, find_idea, sweep
from dsv4_jax.research.speed import DecodeCost
from dsv4_jax.research.sweep import SweepFile, SweepPlan
from dsv4_jax.training.train import shipped_config

pytestmark = pytest.mark.unoptimised

SMALL = dataclasses.replace(
    shipped_config(),
    layer_types=(ds.AttentionType.CSA,) * 2,
    router_types=(ds.RouterType.LEARNED,) * 2,
    hidden_size=32,
    indexer_top_k=4,
    num_mtp_layers=0,
)
MODULE = """
import dsv4_jax as ds

def newest(selection):
    ages = selection.positions[..., None].astype(selection.scores.dtype) + 0 * selection.scores
    return ds.research.select_by_score(selection._replace(scores=-ages))

all_of_them = ds.research.Idea(selector=ds.research.select_all, cache_format="bf16")
number = 3

def helper(text):
    raise KeyError(text)

def raises(selection):
    return helper("a word")

def leaves(selection):
    raise SystemExit(0)

def of_shapes(tokens):
    return tokens.values + tokens.values[..., :3]

def of_two(selection, more):
    return selection.scores > 0

wrong_pooling = ds.research.Idea(pooling=of_shapes)
"""
PLAN = SweepPlan(checkpoint="here", num_rows=2, num_requests=1, repeats=2)
FIGURES = {
    "losses": [1.0, 2.0],
    "step_ms": [1.0, 3.0],
    "cache_bytes": 2**20,
    "workspace_bytes": 2**19,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a module of ideas."""
    (tmp_path / "my_ideas.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_ideas", raising=False)
    importlib.invalidate_caches()
    return tmp_path


@pytest.fixture
def checkpoint(folder):
    """Random weights, and a text of random bytes."""
    ds.save_checkpoint(SMALL, ds.init_params(SMALL, jax.random.key(0)), folder / "model")
    text = np.random.default_rng(0).integers(0, 256, 400).astype(np.uint16)
    np.savez(folder / "text.npz", train=text, validation=text, held_out=text)
    return [str(folder / "model"), "--corpus", str(folder / "text.npz")]


@pytest.mark.slow
def test_a_comparison_is_paired_and_written_by_row_and_position(checkpoint, folder, capsys):
    status = main(
        [
            *("evaluate", *checkpoint, "--length", "64", "--rows", "3"),
            *("--compare", "none", "my_ideas:all_of_them", "--json", "losses.json"),
        ]
    )
    assert status == 0
    printed = capsys.readouterr().out
    assert "difference, row by row" in printed
    assert "beyond position 16" in printed
    found = json.loads((folder / "losses.json").read_text())
    plain, idea = found["measured"]
    assert (plain["name"], idea["name"]) == ("none", "my_ideas:all_of_them")
    losses = np.array(idea["losses"])
    assert losses.shape == (3, 64)
    np.testing.assert_allclose(idea["by_row"], losses.mean(1), atol=1e-4)
    np.testing.assert_allclose(idea["by_position"], losses.mean(0), atol=1e-4)
    assert plain["losses"] != idea["losses"]
    assert idea["loss"]["low"] < idea["loss"]["mean"] < idea["loss"]["high"]


def test_more_than_two_ideas_are_compared_with_the_first(checkpoint, folder, capsys, monkeypatch):
    """The checkpoint may stand behind their names."""
    levels = {"none": 1.0, "bf16": 1.5, "my_ideas:newest": 0.75}

    def losses(params, rows, *, doing, **options):
        return np.full((3, 64), levels[doing.split(" (")[0]], np.float32)

    monkeypatch.setattr(evaluate, "losses_by_row", losses)
    model, *corpus = checkpoint
    command = ["evaluate", *corpus, "--length", "64", "--rows", "3", "--compare", *levels, model]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.count("bf16 from none") == printed.count("my_ideas:newest from none") == 2
    assert "+0.5000 (+0.5000 to +0.5000); bf16 is worse" in printed
    assert "-0.2500 (-0.2500 to -0.2500); my_ideas:newest is better" in printed


@pytest.mark.slow
def test_an_evaluation_goes_on_where_it_was_stopped(checkpoint, folder, capsys, monkeypatch):
    command = ["evaluate", *checkpoint, "--length", "64", "--rows", "3", "--json", "a.json"]
    command += ["--compare", "none", "bf16"]
    asked = []

    def losses(params, rows, *, config, doing, **options):
        asked.append(doing)
        if doing == "bf16 (2 of 2)" and asked.count(doing) == 1:
            raise KeyboardInterrupt
        return np.full((3, 64), 1.25 + len(asked), np.float32)

    monkeypatch.setattr(evaluate, "losses_by_row", losses)
    assert main(command) == 130
    kept = json.loads((folder / "a.json").read_text())
    assert [one["name"] for one in kept["measured"]] == ["none"]
    assert main(command) == 0
    assert asked == ["none (1 of 2)", "bf16 (2 of 2)", "bf16 (2 of 2)"]
    assert "[1 measurements are in a.json already]" in capsys.readouterr().err
    assert main([*command[:-1], "f32"]) == 0  # another comparison begins anew
    assert asked[3:] == ["none (1 of 2)", "f32 (2 of 2)"]
    (folder / "a.json").write_text("[]")
    assert main(command) == 0
    assert asked[5:] == ["none (1 of 2)", "bf16 (2 of 2)"]


@pytest.mark.slow
def test_the_tables_count_their_measurements(checkpoint, capsys, monkeypatch):
    asked = []

    def losses(params, rows, *, config, doing, **options):
        asked.append(doing.rsplit(" (")[1])
        return np.full((2, 32), 1.0 + len(asked), np.float32)

    monkeypatch.setattr(evaluate, "losses_by_row", losses)
    assert main(["evaluate", *checkpoint, "--length", "32", "--rows", "2"]) == 0
    assert asked == [f"{number + 1} of {len(asked)})" for number in range(len(asked))]


@pytest.mark.slow
def test_without_an_idea_there_are_four_tables(checkpoint, capsys):
    assert main(["evaluate", *checkpoint, "--length", "32", "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    for title in ("cache format", "weights", "entries selected", "layers that reuse"):
        assert f"\n{title}" in printed
    assert printed.count(" to ") > 15


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_stopped(checkpoint, folder, capsys, monkeypatch):
    command = ["sweep", *checkpoint, "--out", "cells.jsonl", "--rows", "2", "--repeats", "2"]
    ideas = ["none", "my_ideas:newest", "fp8_per_entry"]
    assert main([*command, "--contexts", "32", *ideas[:2]]) == 0
    first = (folder / "cells.jsonl").read_text()
    assert ["step_ms" in json.loads(line) for line in first.splitlines()] == [False] * 2 + [
        True
    ] * 2
    assert main([*command, "--contexts", "32,64", *ideas]) == 0
    assert (folder / "cells.jsonl").read_text().startswith(first)
    table = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split()[:2] for line in table] == [
        [context, idea] for context in ("32", "64") for idea in ideas
    ]
    assert (folder / "cells.jsonl").read_text().count("\n") == 12


def test_steps_are_timed_in_turns_and_losses_are_kept_at_once(tmp_path, monkeypatch):
    """A machine that grows slower meanwhile makes all ideas of a context slower alike."""
    now, order = [0.0], []

    class Timer:
        def __init__(self, params, token_ids, *, config, max_requests):
            self.name = config.idea.cache_format or "none"

        def measure_ms(self):
            now[0] += 1
            order.append(self.name)
            return now[0]

        def cost(self, step_ms):
            return DecodeCost(tuple(step_ms), 1, 2)

    def stops(*args, config, **options):
        if config.idea.cache_format == "bf16":
            raise KeyboardInterrupt
        return np.ones((2, 8), np.float32)

    monkeypatch.setattr(sweep, "DecodeTimer", Timer)
    monkeypatch.setattr(sweep, "losses_by_row", stops)
    kept = SweepFile(tmp_path / "a.jsonl", dataclasses.replace(PLAN, repeats=3))
    case = (SMALL, None, np.zeros(400, np.int32))
    with pytest.raises(KeyboardInterrupt):
        sweep.measure_context(*case, kept, ideas=["none", "bf16"], context=8)
    again = SweepFile(tmp_path / "a.jsonl", dataclasses.replace(PLAN, repeats=3))
    assert again.losses("none", 8) == [1.0, 1.0]
    assert again.missing(["none", "bf16"], [8]) == [("none", 8), ("bf16", 8)]
    monkeypatch.setattr(sweep, "losses_by_row", lambda *args, **options: np.ones((2, 8)))
    sweep.measure_context(*case, again, ideas=["none", "bf16"], context=8)
    assert order == ["none", "bf16"] * 4
    whole = SweepFile(tmp_path / "a.jsonl", dataclasses.replace(PLAN, repeats=3))
    assert whole.missing(["none", "bf16"], [8]) == []
    cells = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [cell["step_ms"] for cell in cells[-2:]] == [[3, 5, 7], [4, 6, 8]]


def test_rows_are_printed_as_they_are_known_and_each_measurement_is_named(
    checkpoint, folder, capsys, monkeypatch
):
    """Of a context together, since its ideas are timed in turns; none is printed twice."""
    seen, begun, told_left = [], [], []

    class Timer:
        def __init__(self, *args, **options):
            seen.append(capsys.readouterr())

        def measure_ms(self):
            return 1.0

        def cost(self, step_ms):
            return DecodeCost(tuple(step_ms), 1, 2)

    class Recorder(Progress):
        def __init__(self, total, **options):
            begun.append(total)
            super().__init__(total, **options)

        def begin(self, name):
            begun.append(name)
            super().begin(name)
            told_left.append(self.tells_left)

    monkeypatch.setattr(sweep, "DecodeTimer", Timer)
    monkeypatch.setattr("dsv4_jax.cli.sweep.Progress", Recorder)
    monkeypatch.setattr(sweep, "losses_by_row", lambda *args, **options: np.ones((2, 8)))
    command = ["sweep", *checkpoint, "none", "bf16", "--rows", "2", "--contexts", "32,64"]
    assert main([*command, "--out", "a.jsonl"]) == 0
    assert begun[0] == len(begun) - 1 == 10
    assert told_left == [False] * 5 + [True] * 5  # a loss is no measure of a step
    assert begun[1:6] == [
        "the loss of none at 32 tokens",
        "the loss of bf16 at 32 tokens",
        "compiling a decode step of none at 32 tokens",
        "compiling a decode step of bf16 at 32 tokens",
        "timing the steps of 2 idea(s) at 32 tokens, in turns",
    ]
    rows = [[line.split()[:2] for line in one.out.splitlines()[:3]] for one in seen]
    assert rows == [[["context", "idea"]], [], [["32", "none"], ["32", "bf16"]], []]
    assert "[bf16 at 32 tokens: a loss of 1.0000" in seen[0].err
    last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in last] == [["64", "none"], ["64", "bf16"]]
    assert main([*command, "--out", "a.jsonl"]) == 0
    assert capsys.readouterr().out.count("\n") == 5


def test_a_file_of_cells_loses_a_line_that_was_cut_and_no_other(tmp_path, capsys):
    path = tmp_path / "cells.jsonl"
    kept = SweepFile(path, PLAN)
    assert kept.missing(["a", "b"], [64]) == [("a", 64), ("b", 64)]
    kept.add("a", 64, **FIGURES)
    path.write_text(path.read_text() + '{"idea": "b", "cont')
    again = SweepFile(path, PLAN)
    assert again.missing(["a", "b"], [64]) == [("b", 64)]
    again.add("b", 64, **FIGURES | {"losses": [1.5, 2.25]})
    a, b = again.rows(["a", "b"], 64)
    assert "95 % interval" in sweep.HEADER
    assert a.split() == ["64", "a", "1.5000", "2.00", "(1.00", "to", "3.00)", "1.00", "0.50"]
    assert "+0.3750 (" in b
    other = dataclasses.replace(PLAN, num_rows=3)
    assert SweepFile(path, other).missing(["a"], [64]) == [("a", 64)], "measured otherwise"
    path.write_text("no cell\n" + path.read_text())
    with pytest.raises(ValueError, match=r"line 1 of .* is no cell of a sweep"):
        SweepFile(path, PLAN)


def test_ideas_are_found_by_name(folder):
    assert find_idea("none") == Idea()
    assert find_idea("bf16") == Idea(cache_format="bf16")
    assert find_idea("my_ideas:all_of_them").cache_format == "bf16"
    assert find_idea("my_ideas:newest").selector.__name__ == "newest"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "none", "nothing"], "must be none, a cache format"),
        (["--compare", "none"], "--compare must have two ideas or more, got none"),
        (["--compare", "bf16", "shipped"], "--compare must have two ideas or more, got bf16"),
        (["--selector", "no_such_module:f"], "cannot be imported: ModuleNotFoundError"),
        (["--selector", "my_ideas:none"], "cannot be imported: AttributeError"),
        (["--selector", "my_ideas:number"], "selector must be a function or None, got 3"),
        (["--compare", "none", "os:path"], "argument --compare: selector must be a function or "),
        (["--selector", "nothing"], "argument --selector: must be module:name, got 'nothing'"),
        (["--selector", "my_ideas:of_two"], "selector must take (selection), got of_two(selectio"),
        (["--max-selected", "3"], "max_selected=3 needs a selector"),
        (["--format", "bf16", "--compare", "none", "f32"], "not both"),
        (["--length", "9"], "--length must be in 129..4096"),
        (["--index-reuse", "2"], "index_reuse must name CSA layers, got layer 2"),
        (["--rows", "1"], "must be a whole number from 2"),
        (["--json", "no/such/folder.json"], "must be a file in a folder that is there"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    folder, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr("dsv4_jax.cli.evaluate.load_checkpoint", None)
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "first", "frames"),
    [
        (
            ["evaluate", "--selector", "my_ideas:raises"],
            "raises ({folder}/my_ideas.py, line 15) raised KeyError: 'a word'",
            ["raises", "helper"],
        ),
        (
            ["evaluate", "--compare", "none", "my_ideas:leaves"],
            "leaves ({folder}/my_ideas.py, line 18) raised SystemExit: 0",
            ["leaves"],
        ),
        (
            ["sweep", "none", "my_ideas:wrong_pooling", "--out", "a.jsonl"],
            "of_shapes ({folder}/my_ideas.py, line 21) raised TypeError: add got incompatible",
            ["of_shapes"],
        ),
    ],
)
def test_what_a_users_function_raises_is_told_by_its_own_frames(
    folder, checkpoint, capsys, monkeypatch, command, first, frames
):
    """At once: the idea is tried before weights are read, and jax's frames are left out."""
    for module in ("evaluate", "sweep"):
        monkeypatch.setattr(f"dsv4_jax.cli.{module}.load_checkpoint", None)
    sizes = ["--length", "32"] if command[0] == "evaluate" else ["--contexts", "32"]
    words = [command[0], *checkpoint, *command[1:], *sizes, "--rows", "2"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"dsv4-jax {command[0]}: {first.format(folder=folder)}")
    assert re.findall(r"line \d+, in (\w+)\n", told) == frames
    assert told.count("File ") == len(frames)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit(0)\n", "bad:f cannot be imported: SystemExit: 0\n  File "),
        ("1 / 0\n", "ZeroDivisionError: division by zero\n  File "),
        ("def f(:\n", "SyntaxError: invalid syntax (bad.py, line 1)"),
    ],
)
def test_a_module_that_raises_as_it_is_imported_is_told_with_its_line(
    folder, capsys, monkeypatch, code, said
):
    monkeypatch.delitem(sys.modules, "bad", raising=False)
    (folder / "bad.py").write_text(code)
    assert main(["evaluate", "--selector", "bad:f"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("dsv4-jax evaluate: argument --selector: bad:f cannot be imported: ")
    assert said in told
    assert "importlib" not in told


def test_a_sweep_that_could_not_end_is_refused(folder, capsys):
    assert main(["sweep", "none", "--out", "a.jsonl", "--contexts", "99999"]) == 2
    assert "--contexts must be at most 4096" in capsys.readouterr().err
