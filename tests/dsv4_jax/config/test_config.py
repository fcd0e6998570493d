"""Both forms of `config.json`, what is refused in them, and the presets' sizes."""

import copy
import dataclasses
import json
import math
import pathlib
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.config import DSV4Config, YarnScaling
from dsv4_jax.config.layer_schedule import draft_layer
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.write_json import write_config
from dsv4_jax.model.params import param_shapes

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
HASH, LEARNED = RouterType.HASH, RouterType.LEARNED
SAVED = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny"
WINDOW, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)

# What both releases say alike, as their config.json has it.
RELEASED = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}
# fmt: off
FLASH_RATIOS = [
    0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
    4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 0,
]
PRO_RATIOS = [
    128, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
    128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
    4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 0,
]
# fmt: on
FLASH = RELEASED | {
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "compress_ratios": FLASH_RATIOS,
}
PRO = RELEASED | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "compress_ratios": PRO_RATIOS,
}
# The form that transformers writes, of a model with other rates.
NESTED = {
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": [WINDOW, SPARSE, HEAVY, SPARSE],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "compress_rates": {SPARSE: 3, HEAVY: 20},
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 5,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 7.0,
    "num_nextn_predict_layers": 0,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 7,
    "hc_eps": 1e-5,
    "rms_norm_eps": 1e-7,
    "max_position_embeddings": 4096,
    "rope_theta": 5000.0,
    "compress_rope_theta": 40000.0,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 40000.0,
            "partial_rotary_factor": 0.25,
            "factor": 8.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.0,
        },
    },
    "bos_token_id": 2,
    "eos_token_id": [1, 5],
}
NESTED_CONFIG = dataclasses.replace(
    DSV4Config.tiny(),  # whose widths the file has
    layer_types=(SWA, CSA, HCA, CSA),
    router_types=(HASH, LEARNED, HASH, LEARNED),
    sliding_window=5,
    csa_compression_ratio=3,
    hca_compression_ratio=20,
    indexer_top_k=7,
    num_routed_experts=6,
    num_experts_per_token=4,
    moe_intermediate_size=32,
    routed_scaling_factor=2.5,
    swiglu_limit=7.0,
    num_mtp_layers=0,
    hc_mult=2,
    hc_sinkhorn_iters=7,
    hc_eps=1e-5,
    rms_norm_eps=1e-7,
    rope_theta=5000.0,
    compress_rope_theta=40000.0,
    rope_scaling=YarnScaling(factor=8.0, original_max_positions=512, beta_fast=16.0, beta_slow=2.0),
    max_position_embeddings=4096,
    bos_token_id=2,
    eos_token_ids=(1, 5),
)
DELETE = object()


def edited(data, **changes):
    """A copy with some entries changed; `a__b` is entry b of entry a, DELETE removes."""
    data = copy.deepcopy(data)
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = data
        for parent in parents:
            target = target[parent]
        if value is DELETE:
            del target[name]
        else:
            target[name] = value
    return data


# Both forms.


def test_released_form_is_the_preset():
    assert (len(FLASH_RATIOS), len(PRO_RATIOS)) == (44, 62)
    assert DSV4Config.from_hf(FLASH) == DSV4Config.flash()
    assert DSV4Config.from_hf(PRO) == DSV4Config.pro()


def test_flash_and_pro_have_the_published_schedule():
    flash, pro = DSV4Config.flash(), DSV4Config.pro()
    assert [i for i, attn in enumerate(flash.layer_types) if attn == SWA] == [0, 1]
    assert [i for i, attn in enumerate(flash.layer_types) if attn == CSA] == list(range(2, 43, 2))
    assert [i for i, attn in enumerate(flash.layer_types) if attn == HCA] == list(range(3, 42, 2))
    assert SWA not in pro.layer_types
    assert [i for i, attn in enumerate(pro.layer_types) if attn == CSA] == list(range(2, 61, 2))
    assert pro.layer_types.count(HCA) == 31
    for config in (flash, pro):
        assert [i for i, router in enumerate(config.router_types) if router == HASH] == [0, 1, 2]


def test_transformers_form():
    assert DSV4Config.from_hf(NESTED) == NESTED_CONFIG


def test_a_config_saved_by_transformers():
    config = DSV4Config.from_hf(SAVED)
    assert config.layer_types == (SWA, CSA, HCA)
    assert config.router_types == (HASH, LEARNED, LEARNED)
    assert (config.csa_compression_ratio, config.hca_compression_ratio) == (4, 8)
    assert (config.head_dim, config.rope_dim, config.hc_mult) == (16, 4, 2)
    assert config.rope_scaling == YarnScaling(factor=16.0, original_max_positions=65_536)
    assert (config.rope_theta, config.compress_rope_theta) == (10_000.0, 160_000.0)
    assert config.eos_token_ids == (1, 5)
    assert config == DSV4Config.from_hf(SAVED / "config.json")
    assert config == DSV4Config.from_hf(str(SAVED))


def test_flat_rope_parameters_belong_to_the_compress_table():
    flat = edited(
        NESTED,
        qk_rope_head_dim=DELETE,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 512,
        },
    )
    assert DSV4Config.from_hf(flat) == NESTED_CONFIG


def test_no_scaling():
    plain = {"rope_type": "default", "rope_theta": 40000.0}
    config = DSV4Config.from_hf(edited(NESTED, rope_parameters__compress=plain))
    assert config == dataclasses.replace(NESTED_CONFIG, rope_scaling=None)
    assert DSV4Config.from_hf(edited(FLASH, rope_scaling=None)).rope_scaling is None


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, ()), (1, (1,)), (0, (0,)), ([1, 5], (1, 5)), ([], ())]
)
def test_tokens_that_end_a_text(eos, expected):
    assert DSV4Config.from_hf(edited(NESTED, eos_token_id=eos)).eos_token_ids == expected


def test_optional_fields_have_the_releases_values():
    without = edited(
        FLASH,
        hc_mult=DELETE,
        hc_sinkhorn_iters=DELETE,
        hc_eps=DELETE,
        rms_norm_eps=None,
        bos_token_id=DELETE,
        model_type=DELETE,
    )
    expected = dataclasses.replace(DSV4Config.flash(), bos_token_id=None)
    assert DSV4Config.from_hf(without) == expected


def test_reading_changes_nothing():
    data = copy.deepcopy(FLASH)
    DSV4Config.from_hf(data)
    assert data == FLASH


# Rates.


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"compress_ratios": [0, 3, 20, 3]}, (3, 20)),  # two unknown: the smaller one is CSA
        ({"compress_ratios": [0, 3, 20, 3], "compress_rates": {SPARSE: 3, HEAVY: 20}}, (3, 20)),
        # The rates say which is which, and the larger one may be CSA.
        ({"compress_ratios": [0, 20, 3, 20], "compress_rates": {SPARSE: 20, HEAVY: 3}}, (20, 3)),
        ({"compress_ratios": [0, 4, 128, 4]}, (4, 128)),
        ({"compress_ratios": [0, 4, 20, 4]}, (4, 20)),
        ({"compress_ratios": [0, 20, 128, 20]}, (20, 128)),
        ({"layer_types": NESTED["layer_types"]}, (4, 128)),
        (
            {
                "layer_types": NESTED["layer_types"],
                "compress_rate_csa": 3,
                "compress_rate_hca": 20,
            },
            (3, 20),
        ),
        (
            {"compress_ratios": [0, 3, 20, 3], "compress_rate_csa": 3, "compress_rate_hca": 20},
            (3, 20),
        ),
        (
            {
                "layer_types": NESTED["layer_types"],
                "compress_ratios": [0, 3, 20, 3],
                "compress_rates": {SPARSE: 3, HEAVY: 20},
            },
            (3, 20),
        ),
    ],
)
def test_rates(changes, rates):
    data = edited(NESTED, layer_types=DELETE, compress_rates=DELETE)
    config = DSV4Config.from_hf(data | changes)
    assert (config.csa_compression_ratio, config.hca_compression_ratio) == rates
    assert config.layer_types == (SWA, CSA, HCA, CSA)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([0, 4, 4, 0], (SWA, CSA, CSA, SWA)), ([128] * 4, (HCA,) * 4), ([0] * 4, (SWA,) * 4)],
)
def test_schedules_without_a_type(ratios, expected):
    data = edited(NESTED, layer_types=DELETE, compress_rates=DELETE, compress_ratios=ratios)
    config = DSV4Config.from_hf(data)
    assert config.layer_types == expected
    assert (config.csa_compression_ratio, config.hca_compression_ratio) == (4, 128)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compress_ratios": [0, 20, 20, 0]}, "one unknown rate may be either's"),
        ({"compress_ratios": [0, 3, 20, 128]}, "three rates"),
        ({"compress_ratios": [0, 3, 20, 3], "compress_rates": {SPARSE: 3}}, "half of the rates"),
        (
            {"compress_ratios": [0, 8, 8, 8], "compress_rates": {SPARSE: 8, HEAVY: 8}},
            "both types have the rate",
        ),
    ],
)
def test_rates_that_do_not_tell_csa_from_hca(changes, why):
    data = edited(NESTED, layer_types=DELETE, compress_rates=DELETE) | changes
    with pytest.raises(ValueError, match=r"compress_ratios.*compress_rates"):
        DSV4Config.from_hf(data)


# The draft block.


@pytest.mark.parametrize("preset", [DSV4Config.flash, DSV4Config.pro])
def test_draft_layer_is_swa_with_learned_routing(preset):
    """Known bug B16: a draft layer that borrows a trunk layer's ratio and RoPE base (on Pro, whose
    trunk has no window layer to borrow from)."""
    config = preset()
    draft = draft_layer(config)
    assert config.num_mtp_layers == 1
    assert (draft.attn, draft.router) == (SWA, LEARNED)
    assert config.compression_ratio(draft.attn) == 1
    assert draft.layer_idx == config.num_layers == len(config.layer_types)
    assert draft.family_idx == config.layer_types.count(SWA)
    block = param_shapes(config).mtp.block
    assert block.attn.compressor is None
    assert block.attn.indexer is None
    assert block.ffn.tid2eid is None


@pytest.mark.parametrize("released", [FLASH, PRO])
def test_lists_may_name_the_trunk_alone(released):
    short = edited(released, compress_ratios=released["compress_ratios"][:-1])
    assert DSV4Config.from_hf(short) == DSV4Config.from_hf(released)


@pytest.mark.parametrize(("num_nextn", "num_mtp"), [(3, 0), (0, 0), (None, 0), (1, 1)])
def test_several_draft_stages_leave_the_trunk(num_nextn, num_mtp):
    staged = edited(PRO, compress_ratios=[*PRO_RATIOS, 0, 0], num_nextn_predict_layers=num_nextn)
    expected = dataclasses.replace(DSV4Config.pro(), num_mtp_layers=num_mtp)
    assert DSV4Config.from_hf(staged) == expected


def test_draft_entries_in_lists_of_names():
    data = edited(
        NESTED,
        layer_types=[*NESTED["layer_types"], WINDOW],
        mlp_layer_types=[*NESTED["mlp_layer_types"], "moe"],
        num_nextn_predict_layers=1,
    )
    assert DSV4Config.from_hf(data) == dataclasses.replace(NESTED_CONFIG, num_mtp_layers=1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("compress_ratios", {"compress_ratios": [*FLASH_RATIOS[:-1], 4]}),
        ("compress_ratios", {"compress_ratios": [*FLASH_RATIOS, 128]}),
        ("layer_types", {"layer_types": [WINDOW] * 43 + [SPARSE], "compress_ratios": None}),
        ("mlp_layer_types", {"mlp_layer_types": ["moe"] * 43 + ["hash_moe"]}),
    ],
)
def test_a_draft_block_of_another_kind_is_refused(name, changes):
    with pytest.raises(ValueError, match=name):
        DSV4Config.from_hf(FLASH | changes)


# What is refused.

REQUIRED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "swiglu_limit",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "compress_ratios",
    "num_hash_layers",
    "qk_rope_head_dim",
]


@pytest.mark.parametrize("value", [DELETE, None], ids=["absent", "null"])
@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        DSV4Config.from_hf(edited(FLASH, **{name: value}))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("layer_types", "layer_types"),
        ("mlp_layer_types", "mlp_layer_types"),
        ("rope_parameters__main", "rope_parameters.main"),
        ("rope_parameters__compress", "rope_parameters.compress"),
        ("rope_parameters__compress__factor", "factor"),
        (
            "rope_parameters__compress__original_max_position_embeddings",
            "original_max_position_embeddings",
        ),
    ],
)
def test_missing_nested_field_is_named(path, name):
    with pytest.raises(ValueError, match=name):
        DSV4Config.from_hf(edited(NESTED, **{path: DELETE}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", False),
        ("num_key_value_heads", 4),
        ("n_shared_experts", 2),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("mlp_bias", True),
    ],
)
def test_another_model_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        DSV4Config.from_hf(FLASH | {name: value})


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (["layer_types", "num_hidden_layers=4"], {"layer_types": [WINDOW] * 3}),
        (["layer_types", "num_hidden_layers=3"], {"num_hidden_layers": 3}),
        (["layer_types", "full_attention"], {"layer_types": [WINDOW] * 3 + ["full_attention"]}),
        (["layer_types", "compress_ratios"], {"compress_ratios": [0, 3, 3, 20]}),
        (["compress_ratios", "num_hidden_layers=4"], {"compress_ratios": [0, 3, 20]}),
        (["compress_ratios"], {"compress_ratios": [0, 3, 20, 7]}),
        (["compress_rates"], {"compress_rates": {"full_attention": 4}}),
        (["compress_rate_csa", "compress_rates"], {"compress_rate_csa": 4}),
        (["compress_rate_hca", "compress_rates"], {"compress_rate_hca": 128}),
        ([f"compress_rates.{SPARSE}"], {"compress_rates": {SPARSE: 0, HEAVY: 20}}),
        ([f"compress_rates.{SPARSE}"], {"compress_rates": {SPARSE: None, HEAVY: 20}}),
        ([f"compress_rates.{HEAVY}"], {"compress_rates": {SPARSE: 3, HEAVY: -1}}),
        (["mlp_layer_types", "num_hidden_layers=4"], {"mlp_layer_types": ["moe"] * 3}),
        (["mlp_layer_types", "dense"], {"mlp_layer_types": ["moe"] * 3 + ["dense"]}),
        (["mlp_layer_types", "num_hash_layers"], {"num_hash_layers": 2}),
        (["num_hash_layers"], {"num_hash_layers": 5}),
        (["num_hash_layers"], {"num_hash_layers": -1}),
        (["qk_rope_head_dim", "partial_rotary_factor"], {"partial_rotary_factor": 0.5}),
        (["qk_rope_head_dim", "partial_rotary_factor"], {"qk_rope_head_dim": 16}),
        (
            ["rope_parameters.main.partial_rotary_factor"],
            {"rope_parameters__main__partial_rotary_factor": 0.5},
        ),
        (
            ["rope_parameters.compress.partial_rotary_factor"],
            {"rope_parameters__compress__partial_rotary_factor": 0.5},
        ),
        (["rope_theta", "rope_parameters.main.rope_theta"], {"rope_theta": 10000.0}),
        (
            ["compress_rope_theta", "rope_parameters.compress.rope_theta"],
            {"compress_rope_theta": 160000.0},
        ),
        (["rope_parameters.main"], {"rope_parameters__main__rope_type": "yarn"}),
        (["rope_parameters.compress.rope_type"], {"rope_parameters__compress__rope_type": "x"}),
        (["rope_parameters.rope_type"], {"rope_parameters": {"rope_type": "x"}}),
        (["rope_type", "longrope"], {"rope_parameters__compress__rope_type": "longrope"}),
        (["attention_factor"], {"rope_parameters__compress__attention_factor": 1.3}),
        (
            ["rope_parameters", "rope_scaling"],
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 16,
                    "original_max_position_embeddings": 512,
                }
            },
        ),
        (
            ["rope_parameters", "rope_scaling"],
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 16,
                    "original_max_position_embeddings": 512,
                },
            },
        ),
        (["rope_dim", "head_dim"], {"index_head_dim": 4}),
        (["o_groups", "num_attention_heads"], {"o_groups": 3}),
        (["num_experts_per_token", "num_routed_experts"], {"num_experts_per_tok": 7}),
        (["vocab_size"], {"vocab_size": 0}),
        (["hidden_size"], {"hidden_size": -64}),
        (["sliding_window"], {"sliding_window": 0}),
        (["num_attention_heads"], {"num_attention_heads": "4"}),
        (["hidden_size"], {"hidden_size": 64.0}),
        (["swiglu_limit"], {"swiglu_limit": "7.0"}),
    ],
)
def test_contradictions_name_their_fields(names, changes):
    with pytest.raises(ValueError, match=re.escape(names[0])) as caught:
        DSV4Config.from_hf(edited(NESTED, **changes))
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("router_types", {"router_types": (LEARNED,)}),
        ("layer_types", {"layer_types": (), "router_types": ()}),
        ("rope_dim", {"rope_dim": 33}),
        ("rope_dim", {"rope_dim": 32, "indexer_head_dim": 32}),
        ("rope_dim", {"rope_dim": 64, "indexer_head_dim": 64}),
        ("rope_dim", {"rope_dim": 7}),
        ("indexer_head_dim", {"indexer_head_dim": 6}),
        ("num_mtp_layers", {"num_mtp_layers": 2}),
        ("num_mtp_layers", {"num_mtp_layers": -1}),
        ("hc_eps", {"hc_eps": None}),
        ("hc_mult", {"hc_mult": 2.0}),
    ],
)
def test_sizes_that_contradict_each_other(name, changes):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(NESTED_CONFIG, **changes)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        DSV4Config.from_hf(tmp_path / "nowhere.json")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        DSV4Config.from_hf(tmp_path)


@pytest.mark.parametrize("text", ["", '{"vocab_size": 96,', "not json", "[1, 2]", "null"])
def test_broken_json(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json .*JSON"):
        DSV4Config.from_hf(tmp_path)


# Presets.


@pytest.mark.parametrize(
    ("preset", "billions", "without_draft"),
    [(DSV4Config.flash, 290.9, 284.3), (DSV4Config.pro, 1599, 1573)],
)
def test_number_of_parameters(preset, billions, without_draft):
    def count(config):
        leaves = jax.tree_util.tree_flatten_with_path(param_shapes(config))[0]
        return sum(math.prod(leaf.shape) for path, leaf in leaves if "tid2eid" not in str(path[-1]))

    config = preset()
    precision = 0.05e9 if billions < 1000 else 0.5e9
    assert abs(count(config) - billions * 1e9) < precision
    trunk = count(dataclasses.replace(config, num_mtp_layers=0))
    assert abs(trunk - without_draft * 1e9) < precision


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DSV4Config.flash(), 128),
        (DSV4Config.pro(), 128),
        (DSV4Config.tiny(), 128),
        (NESTED_CONFIG, 1920),  # lcm(128, 3, 20)
        (dataclasses.replace(NESTED_CONFIG, layer_types=(SWA, CSA, CSA, SWA)), 384),
        (dataclasses.replace(NESTED_CONFIG, layer_types=(HCA,) * 4), 640),
        (dataclasses.replace(NESTED_CONFIG, layer_types=(SWA,) * 4), 128),
        (dataclasses.replace(NESTED_CONFIG, hca_compression_ratio=256), 768),
    ],
)
def test_block_tokens(config, expected):
    assert config.block_tokens == expected


def test_a_config_is_a_value():
    assert hash(DSV4Config.from_hf(FLASH)) == hash(DSV4Config.flash())
    assert DSV4Config.flash().nope_dim == 448
    with pytest.raises(dataclasses.FrozenInstanceError):
        DSV4Config.flash().head_dim = 8


# Writing.


def through_json(config):
    return DSV4Config.from_hf(json.loads(json.dumps(write_config(config))))


@pytest.mark.parametrize(
    "config", [DSV4Config.flash(), DSV4Config.pro(), DSV4Config.tiny(), NESTED_CONFIG]
)
def test_written_presets_read_back(config):
    assert through_json(config) == config


@st.composite
def configs(draw):
    size = st.integers(1, 300)
    positive = st.floats(1e-7, 1e6)
    vocab_size = draw(size)
    token = st.integers(0, vocab_size - 1)
    rope_dim = 2 * draw(st.integers(1, 150))
    groups = draw(st.integers(1, 16))
    experts = draw(size)
    layers = draw(
        st.lists(
            st.tuples(st.sampled_from(AttentionType), st.sampled_from(RouterType)),
            min_size=1,
            max_size=12,
        )
    )
    sizes = (
        "hidden_size",
        "q_lora_rank",
        "o_lora_rank",
        "sliding_window",
        "csa_compression_ratio",
        "hca_compression_ratio",
        "indexer_num_heads",
        "indexer_top_k",
        "moe_intermediate_size",
        "hc_mult",
        "hc_sinkhorn_iters",
        "max_position_embeddings",
    )
    floats = (
        "routed_scaling_factor",
        "swiglu_limit",
        "hc_eps",
        "rms_norm_eps",
        "rope_theta",
    )
    scaling = st.builds(
        YarnScaling,
        factor=positive,
        original_max_positions=size,
        beta_fast=positive,
        beta_slow=positive,
    )
    return DSV4Config(
        layer_types=tuple(attn for attn, _ in layers),
        router_types=tuple(router for _, router in layers),
        rope_dim=rope_dim,
        head_dim=rope_dim + draw(st.integers(1, 300)),
        indexer_head_dim=rope_dim + draw(st.integers(0, 300)),
        o_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 8)),
        num_routed_experts=experts,
        num_experts_per_token=draw(st.integers(1, experts)),
        num_mtp_layers=draw(st.integers(0, 1)),
        rope_scaling=draw(st.none() | scaling),
        compress_rope_theta=draw(st.floats(1.5, 1e6)),
        vocab_size=vocab_size,
        bos_token_id=draw(st.none() | token),
        eos_token_ids=tuple(draw(st.lists(token, max_size=3))),
        **{name: draw(size) for name in sizes},
        **{name: draw(positive) for name in floats},
    )


@given(config=configs())
def test_written_config_reads_back(config):
    assert through_json(config) == config


def test_every_rope_dim_reads_back():
    """Readers truncate head_dim * partial_rotary_factor, and 44 * (30 / 44) is below 30."""
    for head_dim in range(3, 260):
        for rope_dim in range(2, head_dim, 2):
            config = dataclasses.replace(
                NESTED_CONFIG, head_dim=head_dim, rope_dim=rope_dim, indexer_head_dim=512
            )
            written = write_config(config)
            assert int(head_dim * written["partial_rotary_factor"]) == rope_dim
