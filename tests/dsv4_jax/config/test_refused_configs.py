"""What is refused in a `config.json`, and in a config."""

import dataclasses
import re

import pytest

from dsv4_jax.config import DSV4Config
from helpers.released_configs import (
    DELETE,
    FLASH,
    HEAVY,
    LEARNED,
    NESTED,
    NESTED_CONFIG,
    SPARSE,
    WINDOW,
    edited,
)

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
        (["layer_types", "num_hidden_layers=5"], {"num_hidden_layers": 5}),
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
