"""Sizes of a layer's cache and of the pools, for any model and any context."""

import dataclasses
import fractions
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_jax as ds
from pallas_kernels.common.formats import CACHE_FORMATS

FLASH, PRO, TINY = ds.DSV4Config.flash(), ds.DSV4Config.pro(), ds.DSV4Config.tiny()
SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA


def layers(config):
    return {spec.attn: spec for spec in reversed(ds.layer_schedule(config))}


def of_types(*layer_types, **changes):
    """A small model with those layers."""
    routers = (ds.RouterType.LEARNED,) * len(layer_types)
    return dataclasses.replace(TINY, layer_types=layer_types, router_types=routers, **changes)


# entries_per_block, index keys per block, IC, K, tail a and b of the type at the model's rates.
RELEASED = {SWA: (0, 0, 0, 0, 0, 0), CSA: (32, 32, 128, 512, 4, 4), HCA: (1, 0, 0, 0, 128, 0)}
SMALL = {SWA: (0, 0, 0, 0, 0, 0), CSA: (32, 32, 16, 8, 4, 4), HCA: (4, 0, 0, 0, 32, 0)}
# C, R, H, W.
SIZES = {FLASH: (512, 64, 64, 128), PRO: (512, 64, 128, 128), TINY: (32, 8, 4, 16)}


@pytest.mark.parametrize(
    ("config", "attn", "expected"),
    [
        *((FLASH, attn, sizes) for attn, sizes in RELEASED.items()),
        (PRO, CSA, (32, 32, 128, 1024, 4, 4)),
        (PRO, HCA, RELEASED[HCA]),
        *((TINY, attn, sizes) for attn, sizes in SMALL.items()),
    ],
)
def test_every_field_of_every_type_of_layer(config, attn, expected):
    spec = layers(config)[attn]
    schema = ds.build_schema(config, spec)
    head_dim, rope_dim, heads, window = SIZES[config]
    per_block, keys_per_block, index_dim, top_k, tail_a, tail_b = expected
    assert dataclasses.asdict(schema) == {
        "layer_idx": spec.layer_idx,
        "family_idx": 0,
        "attn_type": attn,
        "cache_format": "fp8_ue8m0",
        "block_tokens": ds.BLOCK_SIZE_ORIGINAL_TOKENS,
        "entries_per_block": per_block,
        "entry_head_dim": head_dim,
        "rope_dim": rope_dim,
        "num_query_heads": heads,
        "indexer_entries_per_block": keys_per_block,
        "indexer_head_dim": index_dim,
        "indexer_top_k": top_k,
        "swa_window_size": window,
        "tail_buffer_size_a": tail_a,
        "tail_buffer_size_b": tail_b,
        "needs_inv_scale": False,
    }
    assert schema.tail_buffer_size == tail_a + tail_b
    assert schema.compression_ratio == max(tail_a, 1)


def test_layer_and_family_places_are_those_of_the_schedule():
    schemas = [ds.build_schema(FLASH, spec) for spec in ds.layer_schedule(FLASH)]
    assert [schema.layer_idx for schema in schemas] == list(range(43))
    assert [schema.family_idx for schema in schemas if schema.attn_type == CSA] == list(range(21))


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_only_the_original_layout_keeps_one_scale_per_entry(cache_format):
    schema = ds.build_schema(TINY, layers(TINY)[CSA], cache_format)
    assert schema.needs_inv_scale == (cache_format == "fp8_per_entry")
    assert schema.format is CACHE_FORMATS[cache_format]


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_the_draft_layer_is_a_window_layer(config):
    """Known bug B16: a draft layer that borrowed another layer's index had its rate and table."""
    schema = ds.build_schema(config, ds.draft_layers(config)[0])
    assert (schema.layer_idx, schema.attn_type) == (config.num_layers, SWA)
    assert (schema.entries_per_block, schema.tail_buffer_size, schema.indexer_top_k) == (0, 0, 0)
    cache = ds.cache.cache_shapes(
        config, max_requests=1, max_context_tokens=128, cache_format="fp8_ue8m0"
    )
    assert cache.schemas[-1] == schema
    assert cache.state["swa"].window["nope"].shape[0] == schema.family_idx + 1


@pytest.mark.parametrize(
    ("csa_rate", "hca_rate", "block_tokens"),
    [(4, 128, 128), (4, 32, 128), (3, 20, 1920), (1, 7, 896), (5, 5, 640), (256, 3, 768)],
)
def test_a_block_holds_whole_entries_at_any_rates(csa_rate, hca_rate, block_tokens):
    config = of_types(CSA, HCA, csa_compression_ratio=csa_rate, hca_compression_ratio=hca_rate)
    for attn, rate in ((CSA, csa_rate), (HCA, hca_rate)):
        schema = ds.build_schema(config, layers(config)[attn])
        assert schema.block_tokens == block_tokens
        assert schema.entries_per_block * rate == block_tokens


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("rates", [(4, 128), (4, 32), (3, 20), (1, 7), (256, 3)])
def test_what_the_views_show_is_what_is_allocated(rates, cache_format):
    """Known bug B3: block counts multiplied by the rate. bytes(view) = bytes(alloc)."""
    config = of_types(
        CSA, HCA, SWA, CSA, csa_compression_ratio=rates[0], hca_compression_ratio=rates[1]
    )
    tokens, requests = 4096, 2
    cache = ds.cache.cache_shapes(
        config, max_requests=requests, max_context_tokens=tokens, cache_format=cache_format
    )
    one = ds.StepInput(
        token_ids=np.zeros(1, np.int32),
        request_ids=np.zeros(1, np.int32),
        request_slots=np.zeros(1, np.int32),
    )
    viewed = {CSA: 0, HCA: 0}
    for layer_idx, schema in enumerate(cache.schemas):
        if schema.attn_type == SWA:
            continue

        def views(cache, layer_idx=layer_idx, is_csa=schema.attn_type == CSA):
            handle = ds.KVCacheManager.acquire(cache, one, layer_idx=layer_idx)
            indexer = handle.read_indexer_view().planes if is_csa else None
            return handle.read_classical_view().planes, indexer

        num_bytes = _bytes(jax.eval_shape(views, cache))
        entry = schema.format.entry_bytes(schema.entry_head_dim, schema.rope_dim)
        if schema.attn_type == CSA:
            entry += schema.format.index_key_bytes(schema.indexer_head_dim)
        blocks = requests * -(-tokens // schema.block_tokens)
        assert num_bytes == blocks * schema.entries_per_block * entry
        viewed[schema.attn_type] += num_bytes
    assert viewed == {attn: _bytes(cache.paged[attn]) for attn in (CSA, HCA)}


def _bytes(tree):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("tokens", "requests", "headroom", "blocks"),
    [
        (1, 1, 0.0, 1),
        (127, 1, 0.0, 1),
        (128, 1, 0.0, 1),
        (129, 1, 0.0, 2),  # the original's floor gave 1
        (129, 3, 0.0, 6),
        (1280, 1, 0.1, 11),  # 0.1 in binary is above 0.1, and would ask for 12
        (128, 1, 0.1, 2),  # the original's int() left no headroom
        (128, 30, 0.1, 33),
        (128, 100, 0.1, 110),  # 100 * 1.1 is above 110 in binary
        (1_048_576, 8, 0.1, 72_090),
    ],
)
def test_budget_rounds_up(tokens, requests, headroom, blocks):
    schedule = ds.layer_schedule(FLASH)
    budget = ds.compute_block_budget(FLASH, schedule, tokens, requests, headroom=headroom)
    assert budget == {"csa": blocks, "hca": blocks}


def test_headroom_is_a_tenth_unless_said():
    assert ds.compute_block_budget(FLASH, ds.layer_schedule(FLASH), 1280, 1)["csa"] == 11


@settings(deadline=None)
@given(
    tokens=st.integers(1, 5000),
    requests=st.integers(1, 20),
    headroom=st.decimals(0, 2, places=3).map(float),
    rates=st.sampled_from([(4, 128), (4, 32), (3, 20), (5, 7)]),
)
def test_full_contexts_of_all_requests_always_fit(tokens, requests, headroom, rates):
    """Known bug B4: what start-up sized, admission must not refuse."""
    config = of_types(CSA, HCA, csa_compression_ratio=rates[0], hca_compression_ratio=rates[1])
    schedule = ds.layer_schedule(config)
    blocks = ds.compute_block_budget(config, schedule, tokens, requests, headroom=headroom)["csa"]
    manager = ds.KVCacheManager(
        config, max_requests=requests, max_context_tokens=tokens, num_blocks=blocks
    )
    for _ in range(requests):
        slot = manager.admit(tokens)
        manager.advance(slot, tokens)
    used = blocks - manager.num_free_blocks
    # No block too many either: the spare ones are the headroom, rounded up once.
    assert manager.num_free_blocks - 1 < used * fractions.Fraction(str(headroom)) <= blocks - used


@pytest.mark.parametrize(
    ("config", "budget"),
    [
        (of_types(SWA, SWA), {"csa": 0, "hca": 0}),
        (of_types(SWA, CSA), {"csa": 6, "hca": 0}),
        (of_types(HCA, HCA), {"csa": 0, "hca": 6}),
    ],
)
def test_families_without_layers_get_no_blocks(config, budget):
    """Known bug B28: no layer of a type, no pool of it."""
    schedule = ds.layer_schedule(config)
    assert ds.compute_block_budget(config, schedule, 300, 2, headroom=0.0) == budget


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context_tokens": 0}, "max_context_tokens must be at least 1, got 0"),
        ({"max_concurrent_requests": -2}, "max_concurrent_requests must be at least 1, got -2"),
        ({"headroom": -0.1}, "headroom must be at least 0, got -0.1"),
    ],
)
def test_budget_errors_name_the_argument(changes, message):
    arguments = {"max_context_tokens": 128, "max_concurrent_requests": 1} | changes
    with pytest.raises(ValueError, match=message):
        ds.compute_block_budget(FLASH, ds.layer_schedule(FLASH), **arguments)


def test_schema_errors_name_the_field():
    config = dataclasses.replace(TINY, indexer_head_dim=24)
    specs = layers(config)
    with pytest.raises(ValueError, match="indexer_head_dim=24"):
        ds.build_schema(config, specs[CSA], "fp8_ue8m0")
    for attn, cache_format in ((CSA, "f32"), (CSA, "bf16"), (HCA, "fp8_ue8m0")):
        assert ds.build_schema(config, specs[attn], cache_format).attn_type == attn
    with pytest.raises(ValueError, match=r"cache_format must be one of .* got 'fp16'"):
        ds.build_schema(config, specs[CSA], "fp16")
