"""`dsv4-jax bench` from end to end on a tiny model: figures that are there, and consistent."""

import json
import re

import pytest

from dsv4_jax.bench import decode, prefill, report
from dsv4_jax.cli import main
from dsv4_jax.config import DSV4Config
from helpers import v41

pytestmark = [pytest.mark.early, pytest.mark.unoptimised]


def bench(tmp_path, *arguments, status=0):
    path = tmp_path / "out.json"
    assert main(["bench", *arguments, "tiny", "--json", str(path)]) == status
    return json.loads(path.read_text())


@pytest.mark.slow
def test_quick_decode_times_the_step_alone(tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    arguments = ("--batch", "2", "--contexts", "64", "--quick", "--plot", str(plot))
    found = bench(tmp_path, "decode", *arguments)
    (row,) = found["rows"]
    assert (row["batch"], row["context"]) == (2, 64)
    assert row["step_ms_least"] <= row["step_ms"] <= row["step_ms_most"]
    assert row["tokens_per_s"] == pytest.approx(2 / row["step_ms"] * 1e3)
    assert row["launches"]["total"] > 100
    assert row["bytes_moved"] > row["cache_bytes_moved"] > 0
    assert "cache_part_ms" not in row
    assert "<svg" in plot.read_text()
    table = capsys.readouterr().out
    assert f"{row['step_ms']:.3f}" in table


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["fp8", "bfloat16"])
def test_weights_of_the_release_are_measured_and_counted(tmp_path, activations):
    """Also with other experts than the config has; floors count those that a batch picks."""
    arguments = ("--weights", "released", "--activations", activations, "--experts", "12")
    few = ("--layers", "3", *arguments)
    found = bench(tmp_path, "decode", "--batch", "2", "--contexts", "64", "--quick", *few)
    (row,) = found["rows"]
    assert (found["weights"], found["experts"]) == ("stored", 12)
    assert row["activations"] == activations
    assert row["finite"]
    assert list(row["by_routing"]) == ["uniform", "zipf"]
    assert row.items() >= row["by_routing"]["uniform"].items()
    assert row["expected_experts"] == pytest.approx(12 * (1 - (9 / 12) ** 2))
    assert 3 <= row["experts_read"] <= 6
    assert set(row["weight_bytes_read"]) == {"BF16", "F32", "FP8", "MXFP4"}
    read = sum(row["weight_bytes_read"].values())
    assert row["bytes_moved"] == row["cache_bytes_moved"] + read
    assert read < row["weight_bytes"]
    found = bench(tmp_path, "prefill", "--tokens", "64", "--chunk", "32", *few)
    (row,) = found["rows"]
    assert row["activations"] == activations
    assert row["weight_bytes_read"]["MXFP4"] > 0


@pytest.mark.slow
def test_decode_times_every_part(tmp_path, capsys):
    found = bench(tmp_path, "decode", "--contexts", "64,256", "--one-bucket")
    assert [row["context"] for row in found["rows"]] == [64, 256]
    for row in found["rows"]:
        assert row["bucket_context"] == 256
        assert row["cache_part_target_ms"] >= 2 * row["cache_part_roofline_ms"] > 0
        assert set(row["layer_ms"]) == {
            "swa_hash",
            "csa_hash",
            "hca_learned",
            "csa_learned",
            "swa_learned",
        }
        assert ("again_compile_s" in row) == (row["context"] == 64)
    assert "ms a layer" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_are_timed_in_a_loop_on_the_device(tmp_path, capsys):
    """Which launches a step 16 times, and holds no part that was not asked for."""
    case = ("decode", "--contexts", "64", "--layers", "3", "--parts", "loop")
    (row,) = bench(tmp_path, *case)["rows"]
    assert row["loop_steps"] == 8  # two calls fill the room of 16 tokens
    assert row["loop_launches"]["total"] > 100 * row["loop_steps"]
    assert 0 < row["loop_ms_least"] <= row["loop_ms"] <= row["loop_ms_most"]
    assert not {"step_ms", "cache_part_ms", "layer_ms"} & row.keys()
    assert f"{row['loop_ms']:.3f}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_cache_part_needs_no_weights(tmp_path):
    found = bench(tmp_path, "decode", "--contexts", "64", "--parts", "cache")
    (row,) = found["rows"]
    assert row["weight_bytes"] == 0
    assert row["cache_part_ms"] > 0
    assert "weights_s" not in found


@pytest.mark.slow
def test_only_compiling_runs_nothing(tmp_path):
    case = ("decode", "--contexts", "64", "--layers", "3", "--parts", "step,cache")
    (row,) = bench(tmp_path, *case, "--compile-only")["rows"]
    assert row["launches"]["total"] > 100
    assert row["cache_part_launches"]["total"] > 0
    assert "failed" not in row
    assert not [name for name in row if name.endswith("_ms")]


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no such kernel\nand a long story")
        yield

    monkeypatch.setattr(decode, "_step_rows", broken)
    case = ("decode", "--contexts", "64", "--parts", "step,cache", "--layers", "3")
    (row,) = bench(tmp_path, *case, status=1)["rows"]
    assert row["failed"] == {"step": "RuntimeError: no such kernel"}
    assert row["cache_part_ms"] > 0
    assert row["cache_part_finite"]
    assert "step failed, RuntimeError: no such kernel" in capsys.readouterr().out


@pytest.mark.slow
def test_kernels_are_all_timed_and_none_is_optimised_away(tmp_path):
    found = bench(tmp_path, "kernels", "--contexts", "256", "--batch", "2")
    ops = {row["op"]: row for row in found["rows"]}
    assert set(ops) == {
        *(f"{attn} {op}" for attn in ("swa", "csa", "hca") for op in ("append", "attention")),
        "csa index",
    }
    for name, row in ops.items():
        assert row["launches"] >= 1, name


@pytest.mark.slow
def test_prefill_is_timed(tmp_path, capsys):
    found = bench(tmp_path, "prefill", "--tokens", "64,128", "--chunk", "32")
    for row, tokens in zip(found["rows"], (64, 128), strict=True):
        assert row["tokens"] == tokens
        assert row["tokens_per_s"] == pytest.approx(tokens / row["prefill_s"])
    assert "64 tokens in calls of 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "step,head"], r"argument --parts: must be of .*, got 'step,head'"),
        (["--contexts", "0"], r"argument --contexts: must be a whole number from 1 to .*, got '0'"),
        (["--layers", "8"], "layers must be in 1..7, got 8"),
        (["--layers", "0"], r"argument --layers: must be a whole number from 1 to .*, got '0'"),
        (["--experts", "0"], r"argument --experts: must be a whole number from 1 to .*, got '0'"),
        (["--experts", "1"], "experts must be at least 3, got 1"),
        (["--engram-rows", "all"], "--engram-rows is of a model with Engram tables; leave it out"),
        (["--engram-rows", "9", "--drafts", "1"], "--engram-rows is of steps without drafts"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(["bench", "decode", "tiny", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_of_a_model_with_engram_tables_the_step_alone_is_timed(capsys):
    assert main(["bench", "decode", "v41-flash", "--parts", "step,cache"]) == 2
    assert "--parts must be step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_of_v41_is_timed(tmp_path, capsys):
    folder, _ = v41.write_released(tmp_path / "v41")
    path = tmp_path / "out.json"
    asked = ["--parts", "step", "--batch", "2", "--contexts", "64", "--weights", "stored"]
    asked += ["--cache-format", "fp4_e4m3", "--json", str(path), "--engram-rows", "all"]
    assert main(["bench", "decode", str(folder), *asked]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["finite"]
    assert 3 < row["experts_read"] <= 6
    assert 0 < row["engram_ms"] < row["engram_step_ms"]
    assert row["engram_pinned_ms"] > 0
    assert re.search(r"to bring them, where a step reads them itself \d", capsys.readouterr().out)


def test_weights_that_were_read_are_said():
    row = {"batch": 1, "context": 64, "expected_experts": 6.0, "floor_ms": 2.609}
    row["weight_bytes_read"] = {"BF16": 1.77e9, "MXFP4": 3.45e9}
    heading, line, _, said = report.decode_table([row, row]).splitlines()
    assert "floor ms" in heading
    assert "2.609" in line
    assert said == (
        "at batch 1 a step reads weights of BF16 1.77, MXFP4 3.45 GB, 6.0 experts of each layer "
        "among them"
    )


def test_what_was_not_run_is_said():
    rows = [
        {"batch": 1, "context": 64, "skipped": "needs 200.0 GiB of 139.0 GiB"},
        {"batch": 8, "context": 64, "failed": {"step": "RESOURCE_EXHAUSTED"}},
    ]
    assert report.decode_line(rows[0]).endswith("skipped needs 200.0 GiB of 139.0 GiB")
    assert report.decode_line(rows[1]).endswith("step failed, RESOURCE_EXHAUSTED")
    assert len(report.decode_table(rows).splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "context", "gigaflops"), [("flash", 8192, 29.6), ("pro", 8192, 109.4)]
)
def test_operations_of_one_more_token(name, context, gigaflops):
    """Section 7.4's whole model at a context, as the difference of two prompts; its head apart."""
    config = getattr(DSV4Config, name)()
    more = prefill.prefill_flops(config, context) - prefill.prefill_flops(config, context - 1)
    head = 2 * config.vocab_size * config.hidden_size
    assert (more + head) / 1e9 == pytest.approx(gigaflops, rel=0.01)


def test_a_plot_has_readable_ticks_and_shows_the_spread(tmp_path, monkeypatch):
    figures, find = [], report.find_matplotlib

    def make(**options):
        figures.append(find()(**options))
        return figures[-1]

    monkeypatch.setattr(report, "find_matplotlib", lambda: make)
    rows = [
        {"batch": 1, "context": context, "step_ms": ms, "step_ms_least": ms - 1, "step_ms_most": ms}
        for context, ms in ((256, 7.0), (131_072, 9.0), (1_048_576, 14.0))
    ]
    skipped = {"batch": 64, "context": 256, "skipped": "needs 200.0 GiB of 139.0 GiB"}
    report.plot_decode([*rows, skipped], tmp_path / "x.png", title="flash")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "128K", "1M"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["6", "8", "10"]
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))
    (bars,) = axes.collections
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[6, 7], [8, 9], [13, 14]]
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["step, batch 1"]
