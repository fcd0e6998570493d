"""Rounds of drafts: what they read, what they are given, and that teaching is exact."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench import (
    round_depths,
    round_floor,
    round_parts,
    round_report,
    rounds,
    taught_rounds,
)
from dsv4_jax.bench.round_case import RoundCase, shapes_of, taught_inputs, usual_stages
from dsv4_jax.bench.round_programs import Model
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cli import main
from dsv4_jax.model.weight_sizes import walk_weights
from dsv4_jax.step.draft_worth import KEPT_TOGETHER
from dsv4_jax.step.serve_step import serve_step
from pallas_kernels.common.weights import is_quantized

pytestmark = pytest.mark.unoptimised

FLASH = dataclasses.replace(ds.DSV4Config.flash().without_draft(), num_routed_experts=192)
FLASH = dataclasses.replace(FLASH, dspark=usual_stages(FLASH))
TINY = ds.DSV4Config.tiny().without_draft()
TINY = dataclasses.replace(
    TINY, layer_types=TINY.layer_types[:2], router_types=TINY.router_types[:2]
)
TINY = dataclasses.replace(TINY, dspark=usual_stages(TINY))


def case(**changes):
    sizes = {"batch": 2, "context": 96, "draft_tokens": 5, "cache_format": "fp8_ue8m0"}
    return RoundCase(**sizes | changes)


def flash_bytes(draft_tokens):
    shapes = ds.unstack_layers(ds.model.param_shapes(FLASH, jnp.bfloat16, weights="stored"))
    return round_floor.round_bytes(
        FLASH, shapes, batch=1, draft_tokens=draft_tokens, context=1, cache_format="fp8_ue8m0"
    )


@pytest.mark.parametrize(
    ("drafts", "verified", "in_all"),
    [(1, 14.56, 17.54), (2, 17.80, 20.78), (3, 20.93, 23.91), (5, 26.91, 29.90)],
)
def test_bytes_of_a_round_of_flash(drafts, verified, in_all):
    """Counted by hand from the released tensors: 192 experts, independent picks, no cache."""
    found = flash_bytes(drafts)
    assert found.plain / 1e9 == pytest.approx(11.22, rel=0.01)
    assert found.verify / 1e9 == pytest.approx(verified, rel=0.01)
    assert (found.context + found.proposal) / 1e9 == pytest.approx(2.98, rel=0.01)
    assert found.round / 1e9 == pytest.approx(in_all, rel=0.01)
    assert found.chain / 1e9 == pytest.approx(5 * 0.0662, rel=0.01)
    assert found.context / 1e9 == pytest.approx(0.0503 + 3 * 4096 * 512 / 1e9, rel=0.01)


@pytest.mark.slow
def test_stages_have_released_formats_and_are_taken_apart():
    made = random_params(TINY, weights="stored")
    expected = ds.unstack_layers(ds.model.param_shapes(TINY, jnp.bfloat16, weights="stored"))
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    draft = dict(walk_weights(made.mtp))
    assert isinstance(made.mtp.stages, tuple)
    assert is_quantized(draft["main_proj"])
    assert is_quantized(draft["stages.2.ffn.w1"])
    for path, leaf in walk_weights(made.mtp):
        values = leaf.decode() if is_quantized(leaf) else leaf
        assert np.isfinite(np.asarray(values, np.float32)).all(), path


def test_floors_count_the_experts_that_were_read():
    found = flash_bytes(5)
    assert found.expert / 1e9 == pytest.approx(0.575, rel=0.001)
    assert found.stage_expert == pytest.approx(found.expert * 3 / 43)
    assert found.experts == pytest.approx({1: 6.0, 5: 28.18, 6: 33.30}, abs=0.01)
    fewer = found.floor_ms("round", -8.3 * found.expert)
    assert fewer == pytest.approx(found.floor_ms("round") * (29.90 - 4.77) / 29.90, rel=0.001)


def test_parts_are_given_the_weights_that_they_read_alone():
    shapes = ds.unstack_layers(ds.model.param_shapes(TINY, jnp.bfloat16))
    context = {path for path, _ in walk_weights(round_parts.context_params(shapes))}
    stages = range(TINY.dspark.num_stages)
    assert context == {"mtp.main_proj", "mtp.main_norm"} | {
        f"mtp.stages.{stage}.attn.{name}" for stage in stages for name in ("wkv", "kv_norm")
    }
    proposal = {path for path, _ in walk_weights(round_parts.proposal_params(shapes))}
    assert {path.split(".")[0] for path in proposal} == {"embed", "head", "mtp"}
    assert len(proposal) == 2 + len(list(walk_weights(shapes.mtp)))


@pytest.mark.parametrize("kept", range(6))
def test_taught_rounds_follow_each_other(kept):
    """The first token of each is the one after those that the round before keeps."""
    one = case()
    said = np.arange(2 * one.rounds * 6).reshape(2, -1) % 90
    inputs = taught_inputs(one, said, kept, 96)
    assert len(inputs) == one.rounds
    for number, given in enumerate(inputs):
        tokens = np.asarray(given.step_input.token_ids).reshape(2, 6)
        start = number * (kept + 1)
        right = tokens == said[:, start : start + 6]
        np.testing.assert_array_equal(right, [[place <= kept for place in range(6)]] * 2)
        np.testing.assert_array_equal(given.num_checked, [6, 6])
        np.testing.assert_array_equal(given.step_input.request_ids, [0] * 6 + [1] * 6)


@pytest.mark.parametrize("given", ["round_input", "random_input"])
def test_a_round_gives_what_the_next_one_is_given(given):
    """Shapes of all that goes round: one program runs them all."""
    one = case()
    params = ds.unstack_layers(ds.model.param_shapes(TINY, jnp.bfloat16))
    cache = one.cache_shapes(TINY)
    store = jax.eval_shape(one.store, cache)
    serve_input = one.round_input() if given == "round_input" else one.random_input(TINY, 6)
    last = one.output(TINY, 5)
    *pools, output = jax.eval_shape(
        functools.partial(serve_step, config=TINY, draft_tokens=5),
        params, cache, store, serve_input, last,
    )  # fmt: skip
    wanted = shapes_of((cache, store, last))
    assert jax.tree.structure((*pools, output)) == jax.tree.structure(wanted)
    assert shapes_of((*pools, output)) == wanted


def test_rounds_leave_room_for_all_that_they_may_keep():
    for context in (24, 96, 8192):
        one = case(context=context)
        assert (one.lengths + one.rounds * one.row_tokens <= context).all()
    assert case(context=8192).rounds == 24


def test_tokens_a_second_lie_between_whole_rounds():
    parts = {"plain": {"ms": 5.0}, "round": {"ms": 15.0}, "overlapped": {"ms": 12.5}}
    row = {"batch": 8, "parts": parts, "taught": "overlapped"}
    row["kept"] = {kept: {"ms": 8.0 + kept / 2} for kept in range(6)}
    table = {each["tokens_a_round"]: each for each in taught_rounds.tokens_per_s(row)}
    assert list(table) == [1.0, 2.8, 3.9, 5.0]
    assert table[2.8]["round_ms"] == pytest.approx(8.9)
    assert table[2.8]["tokens_per_s"] == pytest.approx(8 * 2.8 / 8.9e-3)
    assert table[5.0]["of_plain"] == pytest.approx(5 * 5.0 / 10.0)
    assert table[5.0]["of_plain_at_random"] == pytest.approx(5 * 5.0 / 12.5)
    few = row | {"kept": {kept: row["kept"][kept] for kept in range(3)}}
    assert [each["tokens_a_round"] for each in taught_rounds.tokens_per_s(few)] == [1.0, 2.8]
    row["tokens_per_s"] = taught_rounds.tokens_per_s(row)
    row["context"], row["draft_tokens"] = 8192, 5
    heading, first, *_ = round_report.token_table([row]).splitlines()
    assert heading.split()[:3] == ["requests", "tokens", "a"]
    assert first.split() == ["8", "1.0", "8.000", "8.000", "1,000", "0.62", "0.40"]


def test_a_part_that_fails_leaves_the_others():
    shapes = ds.unstack_layers(ds.model.param_shapes(TINY, jnp.bfloat16))
    programs = {"plain": RuntimeError("no such kernel\nand a long story"), "round": ValueError("x")}
    *_, row = rounds.bench_rounds(Model(TINY, shapes), case(), programs)
    assert row["failed"] == {"plain": "RuntimeError: no such kernel", "round": "ValueError: x"}
    assert round_report.part_line(row, "plain").endswith("failed, RuntimeError: no such kernel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafts", "6"], "drafts must be at most the 5 of a block, got 6"),
        (["--drafts", "5", "--parts", "loop"], "--parts is of steps without drafts"),
        (["--drafts", "5", "--contexts", "9"], "contexts must be longer than 9 with 5 drafts"),
        (["--depths"], "--depths is of rounds with drafts; give --drafts too"),
        (["--drafts", "5", "--depths", "--quick"], "--quick and --profile are of rounds in parts"),
        (["--drafts", "0"], "argument --drafts: must be a whole number from 1 to 16, got '0'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(["bench", "decode", "tiny", "--contexts", "64", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_rounds_are_timed_whole_in_parts_and_as_taught(tmp_path, capsys):
    path = tmp_path / "out.json"
    sizes = ["tiny", "--layers", "2", "--contexts", "64", "--batch", "1"]
    few = ["--part-limit-s", "0.2", "--json", str(path)]
    assert main(["bench", "decode", *sizes, "--drafts", "5", *few]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    timed = {"plain", "round", "free", "proposal", "pass", "context", "undrafted"}
    assert set(row["parts"]) == timed
    for name in ("round", "free", "proposal"):
        assert 3 <= row["parts"][name]["experts_read"] <= 8
    for part in row["parts"].values():
        assert part["ms"] > 0
        assert part["floor_share"] == part["floor_ms"] / part["ms"]
    assert [each["tokens_a_round"] for each in row["kept"].values()] == [1, 2, 3, 4, 5, 6]
    assert {each["as_taught"] for each in row["kept"].values()} == {1.0}
    assert row["parts"]["round"]["alias_bytes"] > 0
    assert row["beside_plain"].keys() == {"undrafted", "round"}
    assert row["beside_plain"]["round"]["median"] > 1
    said = capsys.readouterr().out
    assert "taught to keep 5" in said
    assert "of plain steps" in said
    assert "1 request of 64 tokens, 5 drafts, round, in turns with a plain step: " in said


def test_the_law_counts_what_rounds_of_a_depth_keep():
    """Chances alike are those of the mean; a cut keeps what is left of them."""
    one = case(batch=4)
    alike = round_depths.draft_chances(one, "alike")
    kept, checked = round_depths.tokens_a_round(alike, 5)
    assert (kept, checked) == (pytest.approx(1 + sum(KEPT_TOGETHER)), 5)
    assert round_depths.tokens_a_round(alike, 2)[0] == pytest.approx(1 + sum(KEPT_TOGETHER[:2]))
    kept, checked = round_depths.tokens_a_round(alike, 5, 0.5)
    assert (kept, checked) == (pytest.approx(1 + sum(KEPT_TOGETHER[:3])), 3)
    apart = round_depths.draft_chances(dataclasses.replace(one, batch=64), "apart")
    assert np.std(apart) > 0.2
    together = np.cumprod(apart, axis=-1).mean(axis=(0, 1))
    np.testing.assert_allclose(together, KEPT_TOGETHER, atol=0.03)


def test_a_depth_that_fails_is_told():
    shapes = ds.unstack_layers(ds.model.param_shapes(TINY, jnp.bfloat16))
    programs = {depth: RuntimeError("no such kernel\nand more") for depth in range(6)}
    *_, rows = round_depths.bench_depths(Model(TINY, shapes), case(), programs)
    assert [row["depth"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert {row["failed"] for row in rows} == {"RuntimeError: no such kernel"}


@pytest.mark.slow
def test_depths_are_timed_beside_the_cut(tmp_path, capsys):
    """The device checks as many drafts as the law counts."""
    path = tmp_path / "out.json"
    sizes = ["tiny", "--layers", "2", "--contexts", "64", "--batch", "2"]
    few = ["--part-limit-s", "0.1", "--json", str(path), "--depths"]
    assert main(["bench", "decode", *sizes, "--drafts", "2", *few]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    rows = [(each["law"], each["depth"]) for each in row["depths"]]
    assert rows[:4] == [("alike", depth) for depth in (0, 1, 2, "cut")]
    assert rows[4:8] == [("apart", depth) for depth in (0, 1, 2, "cut")]
    assert rows[-1] == ("apart", "cut at 0.4")
    for each in row["depths"]:
        if "first_checked" in each and each["law"] == "apart":
            assert each["first_checked"] == pytest.approx(each["first_expected"])
    assert "of the best depth" in capsys.readouterr().out
