"""Commands on a mesh of CPU devices, each in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from tools.meshes.harness import environment_of

pytestmark = pytest.mark.slow
MESH = ("--data-shards", "2", "--model-shards", "2")


def command(*arguments):
    """What a command prints to stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_jax", *arguments],
        env=os.environ | environment_of(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("split", [(), ("--split-cache",)], ids=["whole", "split"])
def test_generate_gives_the_text_of_one_device(split):
    """Three prompts on two data shards."""
    texts = ("def add(a, b):", "Return a new", "import")
    asked = ("generate", "shipped", *texts, "--max-new-tokens", "12", "--temperature", "0")
    exact = ("--weights", "float32", "--cache-format", "f32")
    assert command(*asked, *exact, *MESH, *split) == command(*asked, *exact)


@pytest.mark.parametrize("split", [(), ("--split-cache",)], ids=["whole", "split"])
def test_verify_finds_nothing_wrong(split):
    lines = command("verify", "--cache-format", "fp8_ue8m0", *MESH, *split).splitlines()
    assert lines[0].split() == ["parameters", "finite"]
    assert lines[1].startswith("fp8_ue8m0               well, ")


def test_bench_times_steps_and_prompts(tmp_path):
    path = tmp_path / "out.json"
    small = ("tiny", "--layers", "2", "--json", str(path), *MESH)
    lengths = ("--contexts", "200", "--batch", "4")
    text = command("bench", "decode", "--parts", "step", *lengths, *small)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["data"], row["model"], row["batch"]) == (2, 2, 4)
    assert row["tokens_per_s"] == pytest.approx(4 / row["step_ms"] * 1e3)
    assert row["tokens_per_device_s"] == row["tokens_per_s"] / 4
    assert row["floor_collectives_ms"] < row["floor_ms"] < row["step_ms"]
    assert row["finite"]
    assert f"{row['step_ms']:.3f}" in text
    command("bench", "prefill", "--tokens", "128", "--chunk", "64", *small)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["tokens_per_s"] == pytest.approx(2 * 128 / row["prefill_s"])


def test_bench_of_points_some_with_a_split_cache(tmp_path):
    """One process has the weights of all; the split takes half the blocks, in whole ones."""
    path = tmp_path / "out.json"
    small = ("tiny", "--layers", "3", "--json", str(path), *MESH)
    points = ("--points", "2@500,4@500/split,2@500/split")
    text = command("bench", "decode", "--parts", "step", "--profile", *points, *small)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["batch"], row["split_cache"]) for row in rows] == [
        (2, False),
        (4, True),
        (2, True),
    ]
    assert all(row["finite"] and row["step_ms"] > row["floor_ms"] for row in rows)
    assert rows[2]["cache_bytes"] < rows[0]["cache_bytes"] < 2 * rows[2]["cache_bytes"]
    assert "batch 4, context 500, split cache" in text
    command("bench", "decode", "--parts", "step", "--compile-only", *points, *small)
    rows = json.loads(path.read_text())["rows"]
    assert all("compile_s" in row and "step_ms" not in row for row in rows)


def test_bench_of_rounds_keeps_what_it_taught(tmp_path):
    path = tmp_path / "out.json"
    small = ("tiny", "--layers", "1", "--drafts", "2", "--quick", "--json", str(path), *MESH)
    points = ("--points", "2@48", "--part-limit-s", "0.1")
    command("bench", "decode", "--compile-only", *points, *small)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["parts"].keys() == {"plain", "round"}
    assert all("compile_s" in part and "ms" not in part for part in row["parts"].values())
    text = command("bench", "decode", "--profile", *points, *small)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["data"], row["model"], row["batch"]) == (2, 2, 2)
    assert [each["tokens_a_round"] for each in row["kept"].values()] == [1, 2, 3]
    assert {each["as_taught"] for each in row["kept"].values()} == {1.0}
    for part in (*row["parts"].values(), *row["kept"].values()):
        assert 0 < part["floor_collectives_ms"] < part["floor_ms"] < part["ms"]
    assert "1.00 tokens a round" in text
    assert "2 drafts on 2x2, taught to keep 2: " in text
