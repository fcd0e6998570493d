"""Meshes of all devices there are against one of them: on GPUs, and the same program on CPUs."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.layer_schedule import layer_schedule
from tools.meshes import graphs, harness, models, places, results

TOLERANCE = 1e-4
"""Of float32 logits, in units of their spread; a request has seen up to 150 tokens."""


ON_CPUS = harness.environment_of(2)


def run(*arguments, program="tools.meshes.on_gpus", **environment):
    """Exit status and lines of a program, those that are JSON."""
    environment = os.environ | environment | harness.paths()
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-4000:]
    return done.returncode, lines


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("config", models.RELEASED)
def test_meshes_of_gpus(config):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs or more")
    one_by_one = ("--jobs", "1", "--limit-s", "1200")  # this process has most of the memory
    status, lines = run("--config", config, *one_by_one)
    assert status == 0, lines[-1]
    for line in lines:
        if "against" in line:
            assert line["rms_of_spread"] < 0.05
            assert line["near"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "meshes"),
    [("v4", ["1x2", "2x1", "1x2 split", "1x2 dealt"]), ("v41", ["1x2", "2x1", "1x2 dealt"])],
)
def test_the_program_runs_on_cpus(config, meshes):
    """All parts, and logits of float32 that are those of one device."""
    arguments = ("--tiny", "--config", config, "--jobs", "1", "--limit-s", "2400")
    status, lines = run(*arguments, **ON_CPUS)
    assert status == 0, lines[-1]
    compared = [line for line in lines if "against" in line]
    assert [line["against"] for line in compared] == meshes
    rests = [line for line in lines if line.get("part") == "rest" and "left_out" not in line]
    assert len(rests) == (len(meshes) + 1) * (config == "v41")
    assert all(line["equal"] == line["tokens"] for line in rests)
    for line in compared:
        assert line["off_of_spread"] < TOLERANCE
        assert line["best_equal"] == line["selected_equal"] == 1


@pytest.mark.slow
def test_steps_are_timed_with_each_choice_of_command_buffers():
    """CPUs have none, and take no notice of the flags."""
    small = ("--tiny", "--layers", "1", "--points", "2@200", "1@200/split", "--limit-s", "600")
    status, lines = run("graphs", *small, **ON_CPUS)
    assert status == 0, lines
    assert lines[-1]["best"].keys() == {"2@200", "1@200/split"}
    assert lines[-1]["step_ms"]["2@200"].keys() == graphs.SETTINGS.keys()


@pytest.mark.slow
def test_collectives_are_timed(tmp_path):
    path = tmp_path / "out.json"
    small = ("--config", "tiny", "--rows", "1", "8", "--turns", "4", "--json", str(path))
    status, fits = run(*small, program="benchmarks.bench_collectives", **ON_CPUS)
    assert status == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 12
    assert all(row["us"] > row["link_us"] > 0 for row in rows)
    assert {line["fit"] for line in fits} == {row["name"] for row in rows}


def test_places():
    assert places.places(2) == ["one", "1x2", "2x1", "1x2 split", "1x2 dealt"]
    assert places.places(8)[-1] == "2x4"
    assert places.places(2, splits=False) == ["one", "1x2", "2x1", "1x2 dealt"]


def test_layers_of_v41_have_every_kind_of_the_release():
    config, flash = models.v41_config(), ds.DSV4Config.v41_flash()
    found, wanted = ({spec.kind for spec in layer_schedule(one)} for one in (config, flash))
    assert found == wanted
    assert config.sources.candidates.least_entries < max(models.RELEASED["v41"].lengths)
    tables = models.random_tables(config)
    assert sum(len(table.values) for table in tables.tables) == sum(config.engram.table_rows)


def found_of(**changes):
    """Logits of two tokens of a vocabulary of four, and what two requests select."""
    logits = np.array([[0.0, 1.0, 0.9, -1.0], [2.0, 0.0, 0.0, 0.0]])
    selected = np.array([[0, 3, 5], [1, -1, -1]])
    return {"prompt 0": logits, "selected": selected} | changes


def test_logits_are_compared_in_units_of_their_spread():
    found = results.compare(found_of(), found_of())
    assert found["off"] == 0
    assert found["best_equal"] == found["near"] == found["selected_equal"] == 1
    other = found_of()["prompt 0"] + np.array([[0.0, 0.0, 0.2, 0.0], [0.0] * 4])
    selected = np.array([[0, 3, 4], [1, -1, -1]])
    found = results.compare(found_of(**{"prompt 0": other, "selected": selected}), found_of())
    assert found["off"] == pytest.approx(0.2)
    assert found["off_of_spread"] == pytest.approx(0.2 / found_of()["prompt 0"].std())
    assert (found["best_equal"], found["near"], found["selected_equal"]) == (0.5, 1, 0.75)


RESTED = {"place": "one", "part": "rest", "rested_tokens": 128, "rested_where_none_may": 0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"rested_tokens": 0}, ["one rest: upper layers rested for no token"]),
        ({"rested_where_none_may": 5}, ["one rest: they rested for 5 tokens where none may"]),
    ],
)
def test_upper_layers_have_to_rest_where_they_may(changes, said):
    lines = [RESTED | changes, GOOD[2]]
    assert results.complaints(lines, ["one"], ("rest",)) == said


GOOD = [
    {"place": "one", "part": "again", "rows": 3, "differ": 0},
    {"place": "one", "part": "damage", "before": [], "one_shard": ["checksum"], "on_others": []},
    {"place": "one", "part": "fallbacks", "fallbacks": []},
]


@pytest.mark.parametrize(
    ("number", "line", "complaint"),
    [
        (0, {"differ": 2}, "one again: 2 differ"),
        (0, {"failed": "RuntimeError: x"}, "one again: RuntimeError: x"),
        (1, {"one_shard": []}, "one damage: nothing was found of one_shard"),
        (1, {"on_others": ["checksum"]}, "one damage: found ['checksum'] where no step looks"),
        (2, {"fallbacks": ["select_top_k"]}, "one fallbacks: select_top_k"),
    ],
)
def test_what_is_not_as_promised_is_said(number, line, complaint):
    parts = ("again", "damage")
    assert results.complaints(GOOD, ["one"], parts) == []
    lines = [one | (line if n == number else {}) for n, one in enumerate(GOOD)]
    assert results.complaints(lines, ["one"], parts) == [complaint]
    del lines[number]
    (said,) = results.complaints(lines, ["one"], parts)
    assert said.endswith("nothing was printed")


THUNKS = """000: kCommandBuffer [source | sink]
    001: kCustomKernel [source | next=002 (1)] gemm_fusion_dot
    002: kAllReduce    [prev=001 (1) | sink] kAllReduce
    003: kAsyncStart   [prev=002 (1) | sink] async_id=3
        004: kAllGather [source | sink] kAllGather
005: kAsyncStart [source | sink] async_id=5
    006: kAllReduce [source | sink] kAllReduce
007: kAsyncDone [source | sink] async_id=5
008: kReduceScatterStart [source | sink]
009: kReduceScatterDone [source | sink]
"""


def test_collectives_are_found_in_graphs_and_outside(tmp_path):
    name = "module_0001.jit_decode_step.thunk_sequence"
    assert "missing" in graphs.read_thunks(tmp_path)
    (tmp_path / f"{name}.txt").write_text(THUNKS * 2)
    (tmp_path / f"{name}_after_thunk_passes.txt").write_text(THUNKS)
    found = graphs.read_thunks(tmp_path)
    assert (found["graphs"], found["inside"], found["outside"]) == (1, 3, 3)
    assert found["collectives"] == {"inside": 2, "outside": 2}
