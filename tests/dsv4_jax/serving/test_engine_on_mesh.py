"""An engine on a mesh, mostly in `tools.meshes.engine`, and what it refuses."""

import json
import re

import jax
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import sizing
from helpers import serving
from tools.meshes import grammars, on_cpus, two_shards

pytestmark = pytest.mark.unoptimised

MESHES = ("1x1", "1x2", "2x1", "2x2", "4x2")


@pytest.mark.slow
def test_a_short_life_on_two_data_shards_of_two_devices():
    """Every request gets, to the bit, what it gets alone; verified after every step."""
    found = on_cpus.run("engine", "2x2", "--events", "40", "--damage", "--small")["2x2"]
    (life,) = found["lives"]
    assert life["hit_tokens"] > 0
    assert life["most_running"] == [2, 2]
    block = found["damage"]["block"]
    assert found["damage"]["before"] == []
    assert found["damage"]["one_shard"] == [f"checksum: data 1, hca.entries block {block}"]
    assert found["damage"]["one_replica"] == [
        "replica: data 1, model 1, rows hca.entries checksums"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), [("2x1", ()), ("2x2", ()), ("2x2", ("--split",))])
def test_requests_that_leave_a_mesh_come_to_any_of_its_shards(mesh, options):
    """Rows of replicated and of split caches, from all devices and back to them."""
    found = on_cpus.run("engine", mesh, "--events", "50", "--moves", "--small", *options)[mesh]
    (life,) = found["lives"]
    assert life["moved"] > 3


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "split"), [("2x1", ()), ("2x2", ()), ("1x2", ("--split",))])
def test_prefixes_that_lie_on_the_host_come_back_to_any_shard_of_a_mesh(mesh, split):
    """With a split cache to the devices that the blocks of a request are dealt over."""
    options = ("--events", "110", "--host", "--small", "--seeds", "4", *split)
    (life,) = on_cpus.run("engine", mesh, *options)[mesh]["lives"]
    assert life["host_hit_tokens"] > 0


@pytest.mark.slow
def test_prefixes_that_lie_on_a_disk_come_back_to_any_shard_of_a_mesh():
    options = ("--events", "140", "--host", "--disk", "--small", "--seeds", "4")
    (life,) = on_cpus.run("engine", "2x2", *options)["2x2"]["lives"]
    assert life["disk_hit_tokens"] > 0


@pytest.fixture(scope="module")
def long_lives():
    """With drafts, snapshots and every type of layer; by mesh, and tokens of one device."""
    return on_cpus.run("engine", *MESHES, "--events", "150", "--alone", "--seeds", "0", "1")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_long_lives(long_lives, mesh):
    assert long_lives[mesh]["greedy"] == long_lives["one device"]
    for life in long_lives[mesh]["lives"]:
        assert min(life["most_running"]) > 0
        for name in ("hit_tokens", "accepted_tokens", "snapshots", "preempt", "fork", "cancel"):
            assert life[name] > 0, (name, life)


SPLIT_MESHES = ("1x2", "2x2")


@pytest.fixture(scope="module")
def split_lives():
    options = ("--events", "150", "--alone", "--seeds", "0", "1", "--split", "--damage")
    return on_cpus.run("engine", *SPLIT_MESHES, *options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SPLIT_MESHES)
def test_long_lives_of_a_split_cache(split_lives, mesh):
    """The second block of a request lies on the second device, and is verified there alone."""
    found = split_lives[mesh]
    assert found["greedy"] == split_lives["one device"]
    for life in found["lives"]:
        for name in ("hit_tokens", "accepted_tokens", "snapshots", "preempt", "fork", "cancel"):
            assert life[name] > 0, (name, life)
    damage, where = found["damage"], "data 1, " if mesh == "2x2" else ""
    assert damage["before"] == damage["on_others"] == []
    assert damage["one_shard"] == [f"checksum: {where}csa.entries block {damage['block']}"]
    second = damage["second_block"]
    assert damage["on_its_own"] == [f"checksum: {where}csa.entries block {second}"]


@pytest.mark.slow
def test_long_lives_of_a_split_cache_where_blocks_are_few():
    """Requests give way where blocks of one device run out."""
    options = ("--events", "200", "--scarce", "--seeds", "0", "1", "--split")
    found = on_cpus.run("engine", "1x2", *options)["1x2"]
    assert all(life["evicted_blocks"] > 0 for life in found["lives"])
    assert found["outgrown"]["preempted"] > 0
    assert found["outgrown"]["wrong"] == []


@pytest.mark.slow
def test_damage_is_found_in_every_array_on_any_shard_and_device():
    """With every type of layer, drafts, and snapshots."""
    found = on_cpus.run("engine", "2x2", "--everywhere")["2x2"]["everywhere"]
    assert len(found) > 20
    for name, of_array in found.items():
        tables = {"cache.length_tokens": "length", "cache.block_table": "owner"}
        kind = tables.get(name, "checksum")
        assert of_array == {"shard": [[kind, "data 1"]], "replica": [["replica", "data 1"]]}, name


@pytest.mark.slow
def test_answers_with_grammars_are_those_of_one_device():
    """With drafts and without, on parts of the vocabulary and on two data shards."""
    found = on_cpus.run("grammars", "2x2", "1x2", "2x1")
    alone = found["one device"]
    first, expression, _, lark, warm = alone["texts"]
    for text in (first, warm):
        value = json.loads(text)
        assert list(value) == ["n", "k"]
        assert 0 <= value["n"] <= 99
    assert re.fullmatch(grammars.EXPRESSION, expression)
    assert re.fullmatch("xA[0-9]{2}", lark)
    assert [alone["reasons"][number] for number in (0, 1, 3, 4)] == ["stop"] * 4
    for name, of_mesh in found.items():
        assert of_mesh["plain"] == of_mesh["drafted"] == alone["plain"], name
        assert of_mesh["apart"] == alone["plain"], name
        assert of_mesh["texts"] == alone["texts"], name
        assert of_mesh["accepted"] > 10, name


ON_TWO_SHARDS = {
    "test_engine_life.py": (
        "test_whatever_happens_a_request_gets_what_it_gets_alone",  # B19, B20, B32, B34
        "test_what_was_admitted_is_served_when_blocks_run_out",  # B4
        "test_a_fork_and_its_parent_have_the_bytes_of_requests_alone",
        "test_a_step_that_raises_harms_nobody",
    ),
    "test_prefix_reuse.py": (
        "test_a_hit_is_a_cold_run_bit_for_bit",  # B13, B26
        "test_the_same_request_again_hits_all_but_its_last_block_of_tokens",  # B27
    ),
    "test_drafting.py": ("test_speculation_changes_no_token",),  # B15
}
"""Tests of the engine's known bugs (tests/README.md), and of what a shard might break."""


@pytest.mark.slow
@pytest.mark.parametrize("file", ON_TWO_SHARDS)
def test_known_bugs_on_two_data_shards(file):
    names = [f"tests/dsv4_jax/serving/{file}::{name}" for name in ON_TWO_SHARDS[file]]
    said, status = two_shards.run(*names)
    assert status == 0, said[-4000:]
    (engines,) = re.findall(r"^(\d+) engines were on two data shards", said, re.M)
    (passed,) = re.findall(r"^(\d+) passed", said, re.M)
    assert int(passed) >= len(names) <= int(engines)


@pytest.mark.slow
def test_long_lives_where_blocks_are_few():
    found = on_cpus.run("engine", "2x1", "--events", "300", "--scarce", "--seeds", "0", "1", "2")
    for life in found["2x1"]["lives"]:
        assert life["preempted"] > 0
        assert life["evicted_blocks"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "2x2"}, r"mesh must be a Mesh, got '2x2'"),
        ({"mesh": jax.make_mesh((1,), ("x",))}, "mesh must be a .* with the axes"),
    ],
)
def test_what_is_no_mesh_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        serving.make_engine(**options)


def test_parameters_that_lie_on_a_mesh_want_an_engine_there():
    mesh = ds.make_mesh()
    where = ds.param_shardings(serving.CONFIG, mesh)
    params = jax.device_put(serving.params(), where)
    with pytest.raises(ValueError, match=r"params lie on the mesh .*; pass it as mesh"):
        ds.Engine(serving.CONFIG, params)


def test_counts_that_do_not_divide_over_data_shards_are_refused():
    mesh = jax.sharding.AbstractMesh((2, 1), ("data", "model"))
    for name in ("max_requests", "num_blocks", "num_snapshots"):
        with pytest.raises(ValueError, match=f"{name}=5 must divide over the mesh's data"):
            sizing._of_shard(name, 5, mesh)


@pytest.fixture(scope="module")
def v41_lives():
    """A DeepSeek-V4.1 model with tables and drafts."""
    meshes = ("1x2", "2x1", "2x2")
    return on_cpus.run("engine", *meshes, "--v41", "--alone", "--events", "40")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2", "2x1", "2x2"])
def test_lives_of_a_model_whose_layers_share_entries(v41_lives, mesh):
    assert v41_lives[mesh]["greedy"] == v41_lives["one device"]
    (life,) = v41_lives[mesh]["lives"]
    assert life["accepted_tokens"] > 0
    tokens, rested = v41_lives["resting"][mesh]
    assert tokens == v41_lives["resting"]["one device"][0]
    assert rested > 0
