"""The floor of a step on a mesh, beside the figures of design/several_gpus.md."""

import functools
import pathlib
import re

import pytest

import dsv4_jax as ds
from dsv4_jax.bench import floor, placement, roofline
from dsv4_jax.model.weight_sizes import walk_weights
from pallas_kernels.common.weights import weight_bytes

FLASH = ds.DSV4Config.flash()
MILLION = 1_048_576


def step(data, model, batch, *, config=FLASH, context=8192, **options):
    sizes = {"context": context, "cache_format": "fp8_ue8m0"}
    split = {"split_cache": options.get("split_cache", False)}
    placed = placement.place(config, data=data, model=model, gpu_bytes=10**12, **sizes, **split)
    return floor.step_floor(
        config, placed.params, data=data, model=model, batch=batch, **sizes, **options
    )


@pytest.mark.parametrize(
    ("mesh", "published"),
    [
        ((1, 2), (1.97, 10.9, 20.0)),
        ((1, 8), (1.12, 3.80, 7.30)),
        ((8, 1), (2.62, 5.17, 7.05)),
        ((4, 2), (1.75, 3.99, 6.53)),
    ],
)
def test_the_table_of_layouts(mesh, published):
    """It counts two collectives a layer; with both axes a step has four."""
    for batch, milliseconds in zip((1, 32, 256), published, strict=True):
        found = step(*mesh, batch)
        extra = 2 * FLASH.num_layers * floor.COLLECTIVE_S if min(mesh) > 1 else 0.0
        assert (found.seconds - extra) * 1e3 == pytest.approx(milliseconds, rel=0.1)


def test_figures_of_the_page():
    page = pathlib.Path(__file__).parents[3] / "docs" / "design" / "several_gpus.md"
    rows = re.findall(
        r"^\| `--data-shards (\d) --model-shards (\d)` \| (.*\(.*) \|$", page.read_text(), re.M
    )
    assert len(rows) == 4
    for data, model, cells in rows:
        for batch, cell in zip((1, 32, 256), cells.split(" | "), strict=True):
            found = step(int(data), int(model), batch)
            figure = f"{found.seconds * 1e3:.2f} ({found.tokens_per_device_s:,.0f})"
            assert cell == figure, (data, model, batch)


@pytest.mark.parametrize(("mesh", "milliseconds"), [((1, 8), 35), ((8, 1), 10.5)])
def test_a_million_tokens(mesh, milliseconds):
    found = step(*mesh, 256, context=MILLION)
    assert found.seconds * 1e3 == pytest.approx(milliseconds, rel=0.1)


def test_a_million_tokens_of_a_split_cache():
    page = pathlib.Path(__file__).parents[3] / "docs" / "design" / "several_gpus.md"
    table = page.read_text().split("| requests | split, ms a step |")[1].split("\n\n")[0]
    figures = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)
    assert [figure[0] for figure in figures] == ["1", "8", "32", "256"]
    for batch, split, whole in figures:
        count = int(batch)
        for figure, is_split in ((split, True), (whole, False)):
            found = step(1, 8, count, context=MILLION, split_cache=is_split)
            assert found.seconds * 1e3 == pytest.approx(float(figure), abs=0.051)
    split, whole = (step(1, 8, 8, context=MILLION, split_cache=split) for split in (True, False))
    extra = {(c.name, c.count) for c in split.collectives} - {
        (c.name, c.count) for c in whole.collectives
    }
    layers = {attn: FLASH.layer_types.count(attn) for attn in ("csa", "hca")}
    assert extra == {
        ("queries and the best entries", layers["csa"]),
        ("queries", layers["hca"]),
        ("sums of attention", sum(layers.values())),
    }
    assert step(2, 1, 8, split_cache=True).seconds == step(2, 1, 8).seconds


def test_a_split_cache_leaves_room_for_more_requests():
    sizes = {"data": 1, "model": 8, "gpu_bytes": 141 * 10**9, "context": MILLION}
    whole = placement.place(FLASH, **sizes)
    split = placement.place(FLASH, **sizes, split_cache=True)
    for placed, blocks in ((whole, MILLION // 128), (split, MILLION // 128 // 8)):
        pools = placed.beside(1).pools
        of_blocks = pools.memory_bytes - pools.bytes_per_slot - 8 * pools.bytes_per_snapshot
        assert of_blocks == blocks * pools.bytes_per_block
    assert (whole.requests, split.requests) == (32, 240)


def test_one_device_has_no_collectives_and_reads_what_a_decode_step_reads():
    found = step(1, 1, 1)
    assert found.collectives == ()
    placed = ds.model.param_shapes(FLASH, "bfloat16", weights="stored")
    weights = sum(roofline.step_weight_bytes(FLASH, placed, batch=1, experts=6).values())
    assert found.num_bytes == pytest.approx(weights, rel=0.02)  # the cache, and rows of products
    assert found.seconds > weights / roofline.BANDWIDTH


@pytest.mark.parametrize(
    ("mesh", "counts"),
    [
        ((1, 2), {"model": 2 * 43 + 2}),
        ((2, 1), {"data": 2 * 43}),
        ((2, 4), {"model": 2 * 43 + 2, "data": 2 * 43}),
    ],
)
def test_at_most_two_collectives_a_layer_on_each_axis(mesh, counts):
    found = {"data": 0, "model": 0}
    for collective in step(*mesh, 64).collectives:
        found[collective.axis] += collective.count
    assert {axis: count for axis, count in found.items() if count} == counts


def test_bytes_that_a_collective_sends():
    by_name = {(c.axis, c.name): c for c in step(4, 2, 64).collectives}
    rows, dim = 16, 4096
    assert by_name["model", "attention"].sent_bytes == rows * dim * 2
    assert by_name["data", "experts"].sent_bytes == 3 * rows * dim * 2
    assert by_name["data", "rows and routes"].sent_bytes == 3 * rows * (dim * 2 + 6 * 8)


@pytest.mark.parametrize(("activations", "row"), [("fp8", 4096 + 32), ("bfloat16", 2 * 4096)])
def test_many_rows_are_sent_in_e4m3(activations, row):
    found = step(4, 2, 512, activations=activations).collectives
    (gathered,) = [c for c in found if c.name == "rows and routes"]
    assert gathered.sent_bytes == 3 * 128 * (row + 6 * 8)


def test_all_wait_for_the_device_that_most_experts_were_picked_of():
    """One request picks 6 experts; of eight devices, one holds two of them on average."""
    few = floor.busiest_experts(FLASH, batch=1, num_devices=8)
    assert few == pytest.approx(2.15, abs=0.2)
    assert floor.busiest_experts(FLASH, batch=256, num_devices=8) == pytest.approx(32, abs=0.1)
    for devices, most in ((8, 32), (3, 86)):  # all are picked of, and nothing is drawn
        assert floor.busiest_experts(FLASH, batch=2**30, num_devices=devices) == most
    even, uneven = step(8, 1, 1), step(8, 1, 1, busiest=True)
    expert = 3 * 4096 * 2048 * (1 / 2 + 1 / 32) * 43 / roofline.BANDWIDTH
    assert uneven.seconds - even.seconds == pytest.approx((few - 1) * expert, rel=0.01)


@pytest.mark.parametrize("mesh", [(1, 2), (8, 1), (2, 4)])
def test_what_devices_hold_adds_up(mesh):
    """Split weights once over all of their devices, all others on each."""
    placed = placement.place(FLASH, data=mesh[0], model=mesh[1], gpu_bytes=10**12, context=8192)
    whole = placement.place(FLASH, data=1, model=1, gpu_bytes=10**12, context=8192)
    split = {"routed experts": mesh[0] * mesh[1], "embedding": mesh[1], "head": mesh[1]}
    split["shared expert"] = mesh[1]
    for name, parts in split.items():
        mine, all_of_it = placed.families[name], whole.families[name]
        assert {n: count * parts for n, count in mine.items()} == all_of_it
    for name in ("compressors", "indexer", "routing", "hyper-connections", "norms", "hash tables"):
        assert placed.families[name] == whole.families[name]
    assert placed.weight_bytes == sum(weight_bytes(w) for _, w in walk_weights(placed.params))


def test_a_model_that_nothing_holds_names_no_mesh():
    sizes = {"gpu_bytes": 10**9, "context": 8192}
    place_model = functools.partial(placement.place, FLASH, **sizes)
    assert placement.fitting_meshes(place_model) == []
    assert place_model(data=1, model=1).missing_bytes > 158 * 10**9
    assert place_model(data=1, model=1).requests == 0
