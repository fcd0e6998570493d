"""Rounds of drafts on meshes: where requests lie, what programs are given, and the floor."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import dsv4_jax as ds
from dsv4_jax.bench import floor, mesh_step, placement, round_report
from dsv4_jax.bench.mesh_rounds import MeshRoundCase
from dsv4_jax.bench.mesh_step import param_shapes_on
from dsv4_jax.bench.round_case import RoundCase, usual_stages
from dsv4_jax.bench.round_floor import round_bytes
from dsv4_jax.cli import main
from dsv4_jax.mesh import AXES, shardings_of
from dsv4_jax.step.serve_step import serve_step
from tools.meshes import on_cpus

pytestmark = pytest.mark.unoptimised

FLASH = dataclasses.replace(ds.DSV4Config.flash().without_draft(), num_routed_experts=192)
FLASH = dataclasses.replace(FLASH, dspark=usual_stages(FLASH))
TINY = ds.DSV4Config.tiny().without_draft()
TINY = dataclasses.replace(
    TINY, layer_types=TINY.layer_types[:2], router_types=TINY.router_types[:2]
)
TINY = dataclasses.replace(TINY, dspark=usual_stages(TINY))
SIZES = {"context": 96, "draft_tokens": 5, "cache_format": "fp8_ue8m0"}


def on_mesh(data, model, **changes):
    return MeshRoundCase(mesh=AbstractMesh((data, model), AXES), **SIZES | changes)


def test_each_data_shard_has_the_requests_of_one_device():
    """Numbers of rows and slots are those of a shard, and lengths are the same on all."""
    whole, shard = on_mesh(2, 2, batch=12), RoundCase(batch=6, **SIZES)
    np.testing.assert_array_equal(whole.rows, [*range(6), *range(6)])
    np.testing.assert_array_equal(whole.lengths, np.tile(shard.lengths, 2))
    for all_shards, one in zip(
        jax.tree.leaves(whole.cache_shapes(TINY)),
        jax.tree.leaves(shard.cache_shapes(TINY)),
        strict=True,
    ):
        assert all_shards.sharding.shard_shape(all_shards.shape) == one.shape


@pytest.mark.slow
def test_a_round_on_a_mesh_gives_what_the_next_one_is_given():
    case, alone = on_mesh(2, 2, batch=4), RoundCase(batch=4, **SIZES)
    params = param_shapes_on(case.mesh, TINY, weights="bfloat16", peers=None)
    cache = case.cache_shapes(TINY)
    store = case.store_shapes(cache)
    given, last = (
        jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            tree,
            shardings_of(tree, case.mesh),
        )
        for tree in (alone.round_input(), alone.output(TINY, 5))
    )
    *pools, output = jax.eval_shape(
        functools.partial(serve_step, config=TINY, draft_tokens=5),
        params, cache, store, given, last,
    )  # fmt: skip

    def sizes(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert sizes((*pools, output)) == sizes((cache, store, last))


@pytest.mark.parametrize(
    ("mesh", "batch", "plain", "in_round"),
    [((1, 4), 8, 2 * 43 + 2, 2 * 43 + 2 + 2 * 3 + 1 + 5), ((4, 1), 64, 2 * 43, 2 * 43 + 2 * 3)],
)
def test_the_floor_of_a_round_counts_one_device_and_its_collectives(mesh, batch, plain, in_round):
    """The plain step is that of `floor.py`; collectives are counted by hand: attention and experts
    of 43 layers and 3 stages, embedding and best candidates, those of a chain five times.
    """
    case = on_mesh(*mesh, batch=batch, context=8192)
    params = param_shapes_on(case.mesh, FLASH, weights="released", peers=None)
    sizes = {"context": 8192, "cache_format": "fp8_ue8m0"}
    data, model = mesh
    found = round_bytes(
        FLASH, case.device_params(params), batch=batch, draft_tokens=5, data=data, model=model,
        **sizes,
    )  # fmt: skip
    placed = placement.place(
        FLASH, data=data, model=model, gpu_bytes=10**12, weights="released", **sizes
    )
    step = floor.step_floor(FLASH, placed.params, data=data, model=model, batch=batch, **sizes)
    assert found.floor_ms("plain") == pytest.approx(step.seconds * 1e3, rel=0.03)
    assert found.collectives_ms("plain") == pytest.approx(step.collective_s * 1e3)
    assert found.num_collectives("plain") == plain
    assert found.num_collectives("round") == in_round
    alone = round_bytes(
        FLASH, ds.unstack_layers(ds.model.param_shapes(FLASH, weights="released")), batch=batch,
        draft_tokens=5, **sizes,
    )  # fmt: skip
    assert found.chain == pytest.approx(alone.chain / model, rel=0.01)
    assert found.expert == pytest.approx(alone.expert)
    assert found.stage_expert == pytest.approx(alone.stage_expert)
    assert alone.round / (data * model) < found.round < alone.round
    assert not alone.num_collectives("round")


def test_lines_of_a_mesh_name_it():
    found = {"ms": 4.0, "floor_ms": 2.0, "floor_share": 0.5, "tokens_a_round": 1.0}
    found |= {"as_taught": 1.0, "collectives": 100, "floor_collectives_ms": 0.6}
    row = {"batch": 8, "context": 8192, "draft_tokens": 5, "data": 4, "model": 1}
    line = round_report.kept_line(row | {"kept": {0: found}}, 0)
    assert line.startswith("8 requests of 8,192 tokens, 5 drafts on 4x1, taught to keep 0: ")
    assert "floor 2.000 ms, 0.600 of them 100 collectives, 50% of the time," in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data-shards", "2"], "times whole steps and rounds alone on a mesh; add --quick"),
        (["--data-shards", "2", "--quick", "--batch", "3"], "--batch must divide over"),
        (["--model-shards", "2", "--quick", "--split-cache"], "--split-cache is of steps without"),
        (
            ["--model-shards", "2", "--quick", "--points", "2@64,2@64/split"],
            "/split in --points is of steps without drafts",
        ),
        (["--data-shards", "2", "--depths"], "--depths runs on one device"),
        (["--depths", "--compile-only"], "--compile-only compiles no --depths"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(jax, "devices", lambda *_: [jax.local_devices()[0]] * 2)
    monkeypatch.setattr("dsv4_jax.cli.arguments.make_mesh", lambda *_: object())
    sizes = [] if "--points" in arguments else ["--contexts", "64"]
    assert main(["bench", "decode", "tiny", "--drafts", "5", *sizes, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_each_data_shard_of_a_timed_step_has_tokens_of_its_own(monkeypatch):
    given = []
    monkeypatch.setattr(mesh_step, "make_peer_buffers", lambda mesh: None)
    monkeypatch.setattr(mesh_step, "on_shards", lambda trees, mesh: given.append(trees))
    mesh_step.MeshSteps(TINY, AbstractMesh((4, 1), AXES), weights="bfloat16").step_input(3)
    tokens = [tuple(np.asarray(one.token_ids).tolist()) for one in given[0]]
    assert len(set(tokens)) == len(tokens) == 4
    assert all(np.array_equal(one.request_slots, range(3)) for one in given[0])


@pytest.mark.slow
def test_rounds_on_meshes_say_what_one_device_says():
    found = on_cpus.run("rounds", "1x2", "2x1", "2x2")
    assert found.keys() == {"1x2", "2x1", "2x2"}
    for each in found.values():
        assert each["same"] == 1
        assert each["different_tokens"] > 10
        assert each["as_taught"] == [1, 1, 1, 1]
    for name, num_shards in (("1x2", 1), ("2x1", 2), ("2x2", 2)):  # equal tokens pick the same
        for of_devices in found[name]["shards"]:
            assert len(of_devices) == (4 if name == "2x2" else 2)
            assert len({tuple(tokens) for tokens in of_devices}) == num_shards
