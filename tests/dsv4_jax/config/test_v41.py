"""The `config.json` of DeepSeek-V4.1: both forms, both names of fields, and what is refused."""

import dataclasses
import re

import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.engram import primes_from
from dsv4_jax.config.layer_schedule import draft_layers, layer_schedule, split_into_segments
from dsv4_jax.config.sources import Candidates, EntrySources
from dsv4_jax.config.write_json import write_config
from helpers import v41
from helpers.released_configs import FLASH

RELEASED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": v41.QUANTIZATION,
    "text_config": v41.COMMON
    | {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2304,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 16000000,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_markov_rank": 256,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {"num_hidden_layers": 32, "hidden_size": 1024},
}
OTHER_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "num_experts_per_tok": "n_activated_experts",
    "moe_intermediate_size": "moe_inter_dim",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}


def read(**changes):
    """The release's config with changes to its text part; None takes a field out."""
    text = RELEASED["text_config"] | changes
    nested = RELEASED | {"text_config": {n: v for n, v in text.items() if v is not None}}
    return DSV4Config.from_hf(nested, text_only=True)


def test_the_nested_form_is_the_preset():
    assert read() == DSV4Config.v41_flash()
    with pytest.raises(ValueError, match=r"vision_config=.*text_only=True"):
        DSV4Config.from_hf(RELEASED)


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v41_text"])
def test_the_flat_form_is_the_same(model_type):
    beside = ("bos_token_id", "eos_token_id", "quantization_config")
    flat = {name: RELEASED[name] for name in beside}
    flat |= RELEASED["text_config"] | {"model_type": model_type}
    assert DSV4Config.from_hf(flat) == DSV4Config.v41_flash()


def test_fields_have_two_names():
    text = {OTHER_NAMES.get(name, name): v for name, v in RELEASED["text_config"].items()}
    assert not text.keys() & OTHER_NAMES.keys()
    nested = RELEASED | {"text_config": text}
    assert DSV4Config.from_hf(nested, text_only=True) == DSV4Config.v41_flash()


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_two_names_that_differ_are_refused(name):
    other = OTHER_NAMES[name]
    with pytest.raises(ValueError, match=rf"{other} and {name} contradict each other"):
        read(**{other: 7})
    assert read(**{other: RELEASED["text_config"][name]}) == DSV4Config.v41_flash()


@pytest.mark.parametrize("preset", v41.PRESETS)
def test_what_is_written_is_read_again(preset):
    config = DSV4Config.from_hf(v41.contents(preset, quantized=True))
    assert DSV4Config.from_hf(write_config(config)) == config
    flash = DSV4Config.v41_flash()
    assert DSV4Config.from_hf(write_config(flash)) == flash


def test_the_draft_has_three_stages_with_experts_of_its_own():
    config = read()
    assert [spec.layer_idx for spec in draft_layers(config)] == [40, 41, 42]
    assert (config.dspark.num_experts, config.dspark.num_experts_per_token) == (128, 3)
    assert read(num_nextn_predict_layers=0).dspark is None
    assert read(dspark_block_size=0).dspark is None
    assert read(dspark_n_routed_experts=0).dspark.num_experts is None
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers .*3 stages.*got 2"):
        read(num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match=r"num_experts_per_token must be at most the 128 experts"):
        read(dspark_num_experts_per_tok=129)


def test_a_model_cut_by_its_number_of_layers_keeps_what_is_left():
    config = read(num_hidden_layers=10)
    assert config.sources.makers == (2, 8)
    assert config.sources.candidates is None
    assert config.engram.layers == (1,)
    assert config.engram.table_rows == (384006168,)
    assert config.dspark is None


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm_eps", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids",
        "candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size",
        "engram_num_embeddings", "engram_n_heads", "engram_head_dim", "engram_vocab_size",
        "engram_max_ngram_size", "engram_compressed_vocab_size", "engram_pad_token_id",
        "index_topk", "num_hidden_layers", "dspark_markov_rank",
    ],
)  # fmt: skip
def test_a_missing_field_is_named(name):
    with pytest.raises(ValueError, match=rf"\b{name}\b.*missing"):
        read(**{name: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"gate_temp": 2.0}, "gate_temp must be 1.0"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"compress_ratios": [0, 0] + [4] * 41}, r"compress_ratios[2] must be at most 2, got 4"),
        ({"compress_ratios": [0] * 12}, "compress_ratios must have num_hidden_layers=40 entries"),
        ({"compress_ratios": [0, 0] + [2] * 19 + [1] * 19}, "compress_ratios must be equal"),
        ({"kv_source_layer_ids": [8, 2]}, "kv_source_layer_ids must ascend, got [8, 2]"),
        ({"kv_source_layer_ids": [2, 2]}, "kv_source_layer_ids must ascend"),
        ({"kv_source_layer_ids": [1, 8]}, "kv_source_layer_ids must be layers whose ratio is 1"),
        ({"kv_source_layer_ids": [8, 20]}, "at or before layer 2, which reads entries"),
        ({"kv_source_layer_ids": [2, 20, 25]}, "every maker, and layer 25 is missing"),
        ({"kv_source_layer_ids": [2, 20, 24]}, "candidate_source_layer_id must not lie before a"),
        ({"kv_source_layer_ids": ["2"]}, r"kv_source_layer_ids[0] must be a number"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 20]}, "index_source_layer_ids must ascend"),
        ({"index_source_layer_ids": [2, 8, 20]}, "every maker, and layer 14 is missing"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id must be one of"),
        ({"candidate_source_layer_id": -2}, "candidate_source_layer_id must be at least -1"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks must be at least 1"),
        ({"candidate_topk_blocks": 64}, "at least index_topk=512, got 505"),
        ({"engram_layer_ids": [14, 1]}, "engram.layers must ascend"),
        ({"engram_num_embeddings": [384006168] * 2}, "[384006168, 384016682], got"),
        ({"engram_pad_token_id": 129280}, "engram.pad_token_id must be below vocab_size=129280"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be at least 2"),
        ({"dspark_target_layer_ids": [37, 41]}, "dspark_target_layer_ids must be below"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(**changes)


@pytest.mark.parametrize("size", [[128, 128], [32], 32, None, [32, 32, 1]])
def test_weights_in_other_blocks_are_refused(size):
    changed = RELEASED | {"quantization_config": v41.QUANTIZATION | {"weight_block_size": size}}
    with pytest.raises(ValueError, match=r"quantization_config.weight_block_size is"):
        DSV4Config.from_hf(changed, text_only=True)


def test_no_family_reads_the_blocks_or_the_fields_of_the_other():
    other = FLASH | {
        "quantization_config": FLASH["quantization_config"] | {"weight_block_size": [32, 32]}
    }
    with pytest.raises(ValueError, match="weight_block_size"):
        DSV4Config.from_hf(other)
    with pytest.raises(ValueError, match="weight_block_size"):
        read(model_type="deepseek_v4")
    with pytest.raises(
        ValueError, match=re.escape("(or 'deepseek_v41' in a DeepSeek-V4.1 config)")
    ):
        read(model_type="deepseek_v42_text")
    bad = RELEASED | {"quantization_config": v41.QUANTIZATION | {"expert_dtype": "int4"}}
    with pytest.raises(ValueError, match=r"quantization_config\.expert_dtype is 'int4'"):
        DSV4Config.from_hf(bad, text_only=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": DSV4Config.v41_flash().layer_types[::-1]},
            "layer_types must be CSA where",
        ),
        ({"index_reuse": (3,)}, "index_reuse must be empty beside sources"),
        ({"weight_block": 64}, "weight_block must be 128, or 32"),
        ({"indexer_top_k": 2**15}, "must be at least indexer_top_k=32768, got 16377"),
        ({"sources": 3}, "sources must be a EntrySources or None"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(DSV4Config.v41_flash(), **changes)


def test_the_schedule_of_the_release():
    """deepseek_v41.md section 4."""
    schedule = layer_schedule(DSV4Config.v41_flash())
    for spec in schedule:
        layer = spec.layer_idx
        source = max((s for s in (2, 8, 14, 20) if s <= layer), default=None)
        selector = max((s for s in (2, 8, 14, 20, 24, 28, 32, 36) if s <= layer), default=None)
        assert spec.ratio == (0 if layer < 2 else 2 if layer < 20 else 1)
        assert spec.entry_source == source
        assert spec.makes_entries == (layer == source)
        assert spec.makes_selection == (layer == selector)
        assert spec.index_source == (None if layer == selector else selector)
        assert spec.makes_candidates == (layer == 20)
        assert spec.takes_candidates == (layer in (24, 28, 32, 36))
        assert spec.writes_engram == (layer in (1, 14))
    cuts = [(len(s.pattern), s.repeats) for s in split_into_segments(schedule)]
    assert cuts == [(1, 1), (1, 1), (6, 2), (1, 1), (1, 5), (1, 1), (4, 4), (1, 3)]


def test_a_layer_of_v4_makes_what_it_reads():
    for spec in layer_schedule(dataclasses.replace(DSV4Config.flash(), index_reuse=(4,))):
        is_compressed = spec.attn != "swa"
        assert spec.makes_entries == is_compressed
        assert spec.index_source == (2 if spec.layer_idx == 4 else None)
        assert spec.kind == f"{spec.attn}_{spec.router}"
        assert spec.ratio == {"swa": 0, "csa": 4, "hca": 128}[spec.attn]


def test_a_first_source_may_follow_one_window_layer_and_selectors_stand_below_candidates():
    sources = EntrySources(
        ratios=(0, 2, 2, 1, 1),
        makers=(1, 3),
        selectors=(1, 2, 3, 4),
        candidates=Candidates(layer=3, blocks=2, block_size=4),
    )
    assert [sources.is_limited(layer) for layer in range(5)] == [False] * 4 + [True]
    assert sources.candidates.least_entries == 5


def test_primes():
    """deepseek_v41.md section 9."""
    engram = DSV4Config.v41_flash().engram
    assert engram.primes[0][:3] == (16000057, 16000079, 16000081)
    assert engram.primes[1][-3:] == (16000877, 16000879, 16000889)
    assert engram.table_rows == (384006168, 384016682)
    assert primes_from(2, 9) == (2, 3, 5, 7, 11, 13, 17, 19, 23)
