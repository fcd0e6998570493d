"""Steps on a mesh of devices; what needs several runs in processes of its own (`programs`)."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import dsv4_jax as ds
from dsv4_jax import collectives
from dsv4_jax.model.params import param_shapes
from helpers import slow
from tools import mesh_at_size
from tools.meshes import on_cpus, split

pytestmark = pytest.mark.unoptimised

TOLERANCE = 2e-5
MESHES = ("1x1", "1x2", "1x8", "2x1", "8x1", "2x4", "4x2")


def mesh_of(data, model):
    """A mesh without devices, for what only looks at its sizes."""
    return AbstractMesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def specs(config, *sizes, weights="bfloat16", stacked=True):
    shapes = param_shapes(config, jnp.bfloat16, weights=weights)
    shapes = shapes if stacked else ds.unstack_layers(shapes)
    found = ds.param_shardings(config, mesh_of(*sizes), shapes)
    assert jax.tree.structure(found) == jax.tree.structure(shapes)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): sharding.spec
        for path, sharding in jax.tree_util.tree_leaves_with_path(found)
    }


@pytest.mark.parametrize("mesh", slow.all_but(["2x2"], ["2x2", "2x4", "1x2"]))
def test_logits_on_a_mesh_are_those_of_one_device(mesh):
    found = on_cpus.run("steps", mesh)[mesh]
    assert found["logits_off"] < TOLERANCE
    assert found["different"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", slow.all_but(["2x4"], ["2x4", "1x2"]))
def test_rows_that_are_dealt_have_the_logits_of_one_device(mesh):
    found, (data, model) = on_cpus.run("steps", mesh, "--dealt")[mesh], map(int, mesh.split("x"))
    assert found["logits_off"] < TOLERANCE
    assert found["different"] == []
    assert found["dealt"] == [[160 // data, 160 // data // model]]


@pytest.mark.slow
def test_every_kind_of_step_deals_its_rows():
    """A number of rows that does not divide is not dealt."""
    for mesh, found in on_cpus.run("steps", "1x2", "2x4", "1x8", "--all", "--dealt").items():
        assert found["logits_off"] < TOLERANCE, mesh
        assert found["different"] == [], mesh
        divides = int(mesh[-1])
        assert all(
            own == (rows if rows % divides else rows // divides) for rows, own in found["dealt"]
        )
        assert any(own < rows for rows, own in found["dealt"])


@pytest.mark.parametrize(
    ("model", "num_rows", "own"),
    [(1, 8192, 8192), (2, 256, 128), (4, 8192, 2048), (4, 252, 252), (8, 263, 263)],
)
def test_rows_are_dealt_from_a_number_on_that_divides(model, num_rows, own, monkeypatch):
    monkeypatch.setattr(collectives, "axis_size", {"model": model}.get)
    assert collectives.rows_of_a_device(num_rows) == own


@pytest.fixture(scope="module")
def all_steps():
    """Results by mesh; one process, since each compiles the steps of one device too."""
    return on_cpus.run("steps", *MESHES, "--all")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_kind_of_step_on_every_mesh(all_steps, mesh):
    """Chunks, decoding, staged tokens of which some are kept, loops, drafts, sampling."""
    assert all_steps[mesh]["logits_off"] < TOLERANCE
    assert all_steps[mesh]["different"] == []


@pytest.mark.slow
def test_sums_over_devices_are_in_their_order_and_rounded_once():
    """Of one row, of some and of many; a sum of two has no order."""
    for mesh, found in on_cpus.run("steps", "1x4", "1x2", "4x1", "8x1", "1x8", "--sums").items():
        what = "collective" if mesh == "1x2" else "device"
        assert list(found.values()) == [[what, 0]] * 3, mesh


@pytest.mark.slow
def test_rows_are_gathered_in_e4m3_without_a_change_of_any_bit():
    for found in on_cpus.run("steps", "8x1", "2x1", "--rows").values():
        assert found == {"gathered": [["ui8"], ["ui16"]], "differ": 0, "finite": True}


def check_layers(found):
    """Scores with many ties, and lengths that end in any block; a block where none looks for it."""
    first, second = found["wrong_device"]
    assert first.endswith("is of model 0, and it lies on 1")
    assert second.endswith("is of model 1, and it lies on 0")
    for attn in ("csa", "csa, all", "hca"):
        assert found[attn]["selected_differ"] == 0
        assert found[attn]["most_selected"] >= split.TOP_K
        assert found[attn]["attended_off"] < 1e-6


@pytest.mark.slow
def test_dealt_blocks_are_selected_and_attended_to_as_on_one_device():
    check_layers(on_cpus.run("split", "1x2")["1x2"])


SPLIT_MESHES = ("1x2", "1x8", "2x2", "2x4")


@pytest.fixture(scope="module")
def random_steps():
    """Results by mesh; one process, since each compiles the steps of one device too."""
    return on_cpus.run("split", *SPLIT_MESHES, "--steps", "24")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SPLIT_MESHES)
def test_every_kind_of_step_on_a_split_cache(random_steps, mesh):
    """Random ragged schedules, on requests of some ten blocks.

    In a first layer, one value of 25,000 was rounded to the next code.
    """
    found = random_steps[mesh]
    assert found["logits_off"] < TOLERANCE
    assert found["different"] == []
    assert found["stored_off"] < TOLERANCE
    assert found["first_layer"]["most"] <= 1
    assert found["first_layer"]["share"] < 2e-4
    assert found["share_of_blocks"] == int(mesh[-1])
    assert min(found["held"]) > 128
    check_layers(found)


def test_heads_width_vocabulary_and_experts_are_split():
    flash = ds.DSV4Config.flash()
    found = specs(flash, 2, 4, weights="stored")
    layer = "layers.csa_learned."
    assert found["embed"] == found["head"] == P("model")
    for name in ("wq_b.codes", "wq_b.scale", "wo_a.codes", "wo_a.scale", "attn_sink"):
        assert found[f"{layer}attn.{name}"] == P(None, "model")
    assert found[layer + "attn.wo_b.scale"] == P(None, None, "model")
    assert found[layer + "ffn.w2.codes"] == P(None, ("data", "model"))
    assert found[layer + "ffn.shared_w3.codes"] == P(None, "model")
    assert found[layer + "ffn.shared_w2.codes"] == P(None, None, "model")
    assert found["mtp.block.ffn.w1.scale"] == P(("data", "model"))
    for name in ("attn.wkv.codes", "attn.indexer.wq_b.codes", "ffn.gate", "hc_ffn.fn"):
        assert found[layer + name] == P()
    alone = specs(flash, 2, 4, weights="stored", stacked=False)
    assert alone["layers.csa_learned.0.attn.wo_b.codes"] == P(None, "model")


def test_layers_that_are_taken_apart_lie_where_their_stack_lay():
    config, mesh = ds.DSV4Config.tiny(), ds.make_mesh()
    shapes = param_shapes(config)
    where = ds.param_shardings(config, mesh, shapes)
    placed = jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, where
    )
    apart = ds.unstack_layers(placed)
    wanted = ds.param_shardings(config, mesh, apart)
    assert jax.tree.map(lambda leaf: leaf.sharding, apart) == wanted


@pytest.mark.parametrize(
    ("changes", "sizes", "text"),
    [
        (
            {"num_attention_heads": 5, "o_groups": 1},
            (1, 2),
            "num_attention_heads=5 must divide over the mesh's model, got model=2; model may be "
            "1, 5; of 2 devices, data=2 and model=1 would fit$",
        ),
        (
            {"num_routed_experts": 3, "num_experts_per_token": 1},
            (8, 1),
            "num_routed_experts=3 must divide over the mesh's data times model, got data=8 and "
            "model=1; data times model may be 1, 3; of 3 devices, data=3 and model=1 would fit$",
        ),
        (
            {"o_groups": 2},
            (1, 4),
            "o_groups=2 must divide .* model may be 1, 2; of 4 devices, data=4 and model=1, data=2 "
            "and model=2 would fit$",
        ),
        ({"vocab_size": 97}, (1, 2), "vocab_size=97 .* model may be 1, 97"),
        ({"moe_intermediate_size": 51}, (1, 2), "moe_intermediate_size=51 .* 1, 3, 17, 51"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(changes, sizes, text):
    config = dataclasses.replace(ds.DSV4Config.tiny(), **changes)
    with pytest.raises(ValueError, match=text):
        ds.param_shardings(config, mesh_of(*sizes))


def test_a_mesh_of_a_million_devices_is_refused_at_once():
    """Meshes that would fit are looked for among those that the experts divide over alone."""
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"of 256 devices, data=256 and model=1, .*=8 would fit$"):
        ds.param_shardings(ds.DSV4Config.flash(), mesh_of(1024, 1024))
    assert time.process_time() - begun < 2


def test_a_block_of_scales_stays_on_one_device():
    config = dataclasses.replace(ds.DSV4Config.tiny(), moe_intermediate_size=128)
    shapes = param_shapes(config, jnp.float32, weights="stored")
    with pytest.raises(ValueError, match=r"the size of .*=\d+ must divide .* in blocks of 128"):
        ds.param_shardings(config, mesh_of(1, 2), shapes)


def test_a_mesh_has_both_axes_and_its_devices():
    assert ds.make_mesh().shape == {"data": 1, "model": 1}
    for sizes in ({"data": 0}, {"model": True}, {"data": 2**10}):
        with pytest.raises(ValueError, match=r"data|model|devices"):
            ds.make_mesh(**sizes)
    other = AbstractMesh((1,), ("x",))
    for call in (ds.param_shardings, ds.cache_shardings):
        with pytest.raises(ValueError, match=r"mesh must be a .*'data', 'model'"):
            call(ds.DSV4Config.tiny(), other)


def test_a_cache_is_cut_by_slot_and_block():
    config, mesh = ds.DSV4Config.tiny(), ds.make_mesh()
    sizes = {"max_requests": 2, "max_context_tokens": 200, "cache_format": "f32"}
    cache, alone = ds.init_cache(config, **sizes, mesh=mesh), ds.init_cache(config, **sizes)
    where = ds.cache_shardings(config, mesh, cache_format="f32")
    assert jax.tree.map(lambda leaf: leaf.sharding, cache) == where
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), cache, alone))
    assert where.length_tokens.spec == where.block_table.spec == P("data")
    assert {leaf.spec for leaf in jax.tree.leaves((where.state, where.paged))} == {P(None, "data")}


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("mesh", ["1x2", "2x4"])
def test_a_layer_has_two_collectives_on_each_axis(mesh):
    found = mesh_at_size.run(mesh, "--layers", "5", "--batch", "8")[mesh]
    assert found["alias_bytes"] == found["cache_bytes"]
    assert found["large_copies"] == []
    assert found["argument_bytes"] - found["weight_bytes"] < found["cache_bytes"] + 2**20
    assert found["temp_bytes"] < 2**28
    by_axis = dict.fromkeys(("data", "model"), 0)
    for name, figures in found["collectives"].items():
        axis = name.split()[0]
        by_axis[axis] += figures["a_layer"]
        assert max(map(int, figures["bytes"])) <= 2**17, json.dumps(found["collectives"])
        own = set(figures["kernels"]) - {"None", "KERNEL_STRATEGY_DEFAULT"}
        assert not own, f"{name} is no collective of NCCL: {own}"
    assert by_axis == {"data": 2 if mesh == "2x4" else 0, "model": 2}


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("mesh", ["1x4", "4x1"])
def test_v41_flash_on_four_gpus_copies_no_weight(mesh):
    """All layers and experts, 64 requests; an op that would run its reference raises.

    V4-Flash's step of the same sizes is compiled beside it, which may take half as long.
    """
    options = ("--batch", "64", "--context", "131072")
    found = mesh_at_size.run(mesh, "--config", "v41_flash", *options)[mesh]
    assert found["alias_bytes"] == found["cache_bytes"]
    assert found["large_copies"] == []
    assert found["weight_sized"] == []
    assert found["argument_bytes"] - found["weight_bytes"] < found["cache_bytes"] + 2**24
    assert found["temp_bytes"] <= 2**28
    of_v4 = mesh_at_size.run(mesh, *options)[mesh]
    seconds = [one["trace_s"] + one["compile_s"] for one in (found, of_v4)]
    assert seconds[0] <= 2 * seconds[1]


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    "options", [(), ("--split", "--context", "65536"), ("--batch", "2")], ids=str
)
def test_with_peer_buffers_a_step_has_no_collective_of_nccl(options):
    found = mesh_at_size.run("2x4", "--layers", "5", "--batch", "8", "--peers", *options)["2x4"]
    assert found["collectives"] == {}
    assert found["alias_bytes"] == found["cache_bytes"]
    assert found["large_copies"] == []


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_a_split_cache_has_two_more_collectives_a_layer(mesh):
    """Two of five layers are of windows alone, which have two; the embedding has one.

    Eleven sums are gathered, as those of more than two devices are.
    """
    options = ("--layers", "5", "--batch", "8", "--context", "65536", "--split")
    found = mesh_at_size.run(mesh, *options)[mesh]
    assert found["alias_bytes"] == found["cache_bytes"]
    assert found["large_copies"] == []
    counts = {name: figures["in_program"] for name, figures in found["collectives"].items()}
    of_model = {name: count for name, count in counts.items() if name.startswith("model")}
    assert of_model == {"model all-gather": 11 + 3, "model all-to-all": 3}
