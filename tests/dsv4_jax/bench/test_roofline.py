"""Rooflines against the tables of deepseek_v4.md section 7."""

import dataclasses

import pytest

import dsv4_jax as ds
from dsv4_jax.bench import roofline
from dsv4_jax.bench.routing_laws import expected_experts
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.config.layer_schedule import layer_schedule

MILLION = 1_048_576


def works(config, context, batch=1, cache_format="fp8_ue8m0"):
    return roofline.step_cache_work(config, batch=batch, context=context, cache_format=cache_format)


def read_bytes(config, context):
    """What section 7.5 counts: entries and index keys that are read; no queries, no appends."""
    heads, dim = config.num_attention_heads, config.head_dim
    found = works(config, context)
    num_layers = config.num_layers
    total = sum(w.num_bytes for name, w in found.items() if name.endswith("attention"))
    total -= num_layers * 2 * heads * dim * 2
    if "csa index" in found:
        csa = config.layer_types.count("csa")
        queries = config.indexer_num_heads * config.indexer_head_dim + 4 * config.indexer_top_k
        total += found["csa index"].num_bytes - csa * queries
    return total


def weights_read(config, params, *, batch):
    experts = expected_experts(config, rows=batch)
    return roofline.step_weight_bytes(config, params, batch=batch, experts=experts)


@pytest.mark.parametrize(
    ("name", "context", "megabytes"),
    [
        ("flash", 8192, 13.2),
        ("flash", 131_072, 68.3),
        ("flash", MILLION, 479.5),
        ("pro", 8192, 27.8),
        ("pro", 131_072, 107.9),
        ("pro", MILLION, 705.6),
    ],
)
def test_bytes_read_from_the_cache(name, context, megabytes):
    config = getattr(ds.DSV4Config, name)()
    assert read_bytes(config, context) / 1e6 == pytest.approx(
        megabytes, abs=0.06
    )  # the table sums rounded terms


@pytest.mark.parametrize(("context", "megaflops"), [(8192, 33.9), (131_072, 543), (MILLION, 4345)])
def test_products_of_index_scores(context, megaflops):
    config = ds.DSV4Config.flash()
    index = works(config, context)["csa index"]
    assert index.flops / 21 / 1e6 == pytest.approx(megaflops, rel=2e-3)
    assert index.in_fp8


@pytest.mark.parametrize(("name", "megaflops"), [("flash", 83.9), ("pro", 302.0)])
def test_products_of_attention(name, megaflops):
    config = getattr(ds.DSV4Config, name)()
    layers = config.layer_types.count("csa")
    flops = works(config, 131_072)["csa attention"].flops
    assert flops / layers / 1e6 == pytest.approx(megaflops, rel=2e-3)


def test_everything_selected_needs_no_index():
    config = ds.DSV4Config.flash()
    assert "csa index" not in works(config, 2048)
    assert "csa index" in works(config, 2052)


def test_rooflines_add_up_layer_by_layer_and_grow_with_the_batch():
    config = ds.DSV4Config.flash()
    sizes = {"context": 131_072, "cache_format": "fp8_ue8m0"}
    one = roofline.step_cache_roofline_s(config, batch=1, **sizes)
    assert one * 1e6 == pytest.approx(68.3e6 / 4.3e12 * 1e6, rel=0.25)  # beside appends, queries
    assert roofline.step_cache_roofline_s(config, batch=8, **sizes) == pytest.approx(8 * one)


@pytest.mark.parametrize("name", ["flash_slim", "pro_slim"])
def test_weights_that_a_step_reads(name):
    config = dataclasses.replace(getattr(ds.DSV4Config, name)(), num_mtp_layers=0)
    shapes = ds.model.param_shapes(config, "bfloat16")
    tables = sum(tree_bytes(layers.ffn.tid2eid) for layers in shapes.layers.values())
    everything = tree_bytes(shapes) - tree_bytes(shapes.embed) - tables
    d, width = config.hidden_size, config.moe_intermediate_size
    expert = config.num_layers * 3 * d * width * 2
    one = weights_read(config, shapes, batch=1)
    assert set(one) == {"BF16", "F32"}
    assert sum(one.values()) == pytest.approx(everything - 2 * expert + 2 * d)
    many = weights_read(config, ds.unstack_layers(shapes), batch=64)
    assert sum(many.values()) == pytest.approx(everything + 64 * 2 * d, rel=1e-6)


def test_released_weights_that_a_step_reads():
    """One token of Flash reads 11.3 GB and one of Pro 40; 32 tokens of Flash pick 136 experts."""
    shapes = {}
    for name, gigabytes in (("flash", 11.3), ("pro", 40)):
        config = getattr(ds.DSV4Config, name)()
        shapes[name] = ds.model.param_shapes(config, "bfloat16", weights="stored")
        found = weights_read(config, shapes[name], batch=1)
        assert set(found) == {"BF16", "F32", "FP8", "MXFP4"}
        assert sum(found.values()) / 1e9 == pytest.approx(gigabytes, rel=0.01)
    flash = ds.DSV4Config.flash()
    assert expected_experts(flash, rows=1) == pytest.approx(6)
    assert expected_experts(flash, rows=32) == pytest.approx(136, abs=1)
    expert = flash.num_layers * 3 * 2048 * 4096 * (1 / 2 + 1 / 32)
    found = weights_read(flash, shapes["flash"], batch=32)
    assert found["MXFP4"] == pytest.approx(expected_experts(flash, rows=32) * expert)


@pytest.mark.parametrize(
    ("context", "index_bytes"),
    [
        (512, 0),  # everything is selected
        (8192, 3 * 4096 * 68 + 5 * 8192 * 68),
        (MILLION, 3 * MILLION // 2 * 68 + MILLION * 68 + 4 * 16_384 * 68 + 5 * 2048 * 4),
    ],
)
def test_reads_of_layers_that_share_entries(context, index_bytes):
    """deepseek_v41.md section 10: 528 bytes of a window row, 288 of an entry, 68 of a key."""
    config = ds.DSV4Config.v41_flash()
    found = works(config, context, cache_format="fp4_e4m3")
    heads = config.num_attention_heads * config.head_dim
    selected = 20 * min(context, 512) + 18 * min(context // 2, 512)
    attended = found["csa attention"].num_bytes + found["swa attention"].num_bytes
    assert attended == 40 * (128 * 528 + 2 * heads * 2) + selected * 288
    selecting = 8 if index_bytes else 0
    if selecting:
        queries = selecting * (32 * 128 + 4 * 512)
        assert found["csa index"].num_bytes == index_bytes + queries
    assert ("csa index" in found) == bool(selecting)


def test_a_million_tokens_read_less_than_half_of_what_v4_reads():
    flash, v41 = ds.DSV4Config.flash(), ds.DSV4Config.v41_flash()
    options = {"batch": 1, "context": MILLION}
    seconds = [
        roofline.step_cache_roofline_s(config, cache_format=name, **options)
        for config, name in ((flash, "fp8_ue8m0"), (v41, "fp4_e4m3"))
    ]
    assert seconds[1] / seconds[0] < 0.5


def test_makers_write_their_entries_and_pairs_wait():
    """A pair's first token is written and read again; one-token entries keep nothing waiting."""
    config = ds.DSV4Config.v41_flash()
    specs = layer_schedule(config)
    sizes = {"batch": 1, "context": 4096, "cache_format": "fp4_e4m3"}
    pair, reader, one = (roofline.cache_work(config, specs[n], **sizes)[0] for n in (2, 3, 20))
    values, entry = 512 * 4, 288 + 68
    assert pair.num_bytes - reader.num_bytes == 2 * values + 2 * values + entry / 2
    assert one.num_bytes - reader.num_bytes == values + entry
