"""Spellings of a DeepSeek-V4 config, and what transformers reads in each: `config_spellings.json`.

    python tests/data/make_spellings.py        (an environment with transformers 5.24.0 alone)

Each case is the released form or the one that transformers writes, with some fields changed or
taken away. The answer is what `DeepseekV4Config` makes of it, or that it refuses.
"""

import itertools
import json
import pathlib
import re

import transformers
from transformers import DeepseekV4Config

FILE = pathlib.Path(__file__).with_name("config_spellings.json")
SPARSE, HEAVY, WINDOW = (
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "sliding_attention",
)
YARN = {
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}
RELEASED = {
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn"} | YARN,
}
TYPES = [WINDOW, SPARSE, HEAVY, SPARSE, HEAVY]
NESTED = {k: v for k, v in RELEASED.items() if k not in ("compress_ratios", "num_hash_layers")} | {
    "layer_types": TYPES,
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 3,
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "partial_rotary_factor": 0.25}
        | YARN
        | {"attention_factor": 1.0},
    },
}
GONE = "(gone)"
"""Stands for a field that is taken away."""

# Of each group one at a time; then pairs of groups.
GROUPS = {
    "layers": [{"num_hidden_layers": n} for n in (1, 2, 3, 4, 6)]
    + [
        {"num_hidden_layers": 5, "compress_ratios": [0, 4, 128, 4, 128]},
        {"compress_ratios": [0, 4, 128, 4, 128, 0, 0, 0], "num_nextn_predict_layers": 3},
        {"compress_ratios": [0, 4, 128, 4, 128, 4]},
        {"compress_ratios": [0, 4, 128]},
        {"compress_ratios": None, "layer_types": TYPES},
        {"compress_ratios": None, "layer_types": [*TYPES, WINDOW]},
        {"compress_ratios": None, "layer_types": [*TYPES, SPARSE, HEAVY], "num_hidden_layers": 3},
        {"compress_ratios": None, "layer_types": TYPES[:3]},
        {"layer_types": TYPES},
        {"layer_types": [WINDOW] * 5},
        {"compress_ratios": [0, 8, 64, 8, 64, 0]},
    ],
    "routers": [{"num_hash_layers": n} for n in (0, 1, 5, 7)]
    + [
        {"num_hash_layers": None, "mlp_layer_types": ["hash_moe"] + ["moe"] * 4},
        {"num_hash_layers": None, "mlp_layer_types": ["hash_moe"] + ["moe"] * 6},
        {"num_hash_layers": 1, "mlp_layer_types": ["hash_moe"] + ["moe"] * 4},
        {"num_hash_layers": 3, "mlp_layer_types": ["hash_moe"] + ["moe"] * 4},
        {"num_hash_layers": None, "mlp_layer_types": ["hash_moe"] * 2},
    ],
    "rates": [
        {"compress_rates": {SPARSE: 4, HEAVY: 128}},
        {"compress_rates": {SPARSE: 4, HEAVY: 128, WINDOW: 0}},
        {"compress_rates": {SPARSE: 4, HEAVY: 128, WINDOW: 1}},
        {"compress_rates": {SPARSE: 4, HEAVY: 128, WINDOW: None}},
        {"compress_rates": {SPARSE: 8, HEAVY: 128}},
        {"compress_rate_csa": 4},
        {"compress_rate_csa": 4, "compress_rate_hca": 128},
        {"compress_rate_csa": 4, "compress_rates": {SPARSE: 8, HEAVY: 128}},
    ],
    "rope": [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "yarn"} | YARN},
        {"rope_scaling": {"type": "yarn", "rope_type": "yarn"} | YARN},
        {"rope_scaling": {"type": "yarn", "attention_factor": 1.0} | YARN},
        {"rope_scaling": {"type": "yarn", "attention_factor": 1.3} | YARN},
        {"rope_scaling": {"type": "yarn", "truncate": False} | YARN},
        {"rope_scaling": {"type": "yarn", "truncate": True} | YARN},
        {"rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0} | YARN},
        {"rope_scaling": {"type": "yarn", "factor": 16}},
        {"rope_scaling": {"type": "linear", "factor": 16}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "yarn"} | YARN},
        {"rope_scaling": None, "rope_parameters": {"type": "yarn"} | YARN},
        {
            "rope_scaling": None,
            "rope_theta": GONE,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000} | YARN,
        },
        {
            "rope_scaling": None,
            "rope_theta": GONE,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000} | YARN,
        },
        {
            "rope_scaling": None,
            "rope_theta": 7000,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000} | YARN,
        },
        {"rope_theta": GONE, "rope_parameters": {"rope_theta": 10000}},
        {"rope_scaling": None, "rope_theta": GONE, "rope_parameters": {"rope_theta": 10000}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_theta": GONE},
        {"compress_rope_theta": GONE},
        {"rope_theta": 7000},
    ],
    "nested": [
        {"rope_theta": GONE, "compress_rope_theta": GONE},
        {"rope_theta": GONE},
        {"rope_theta": 7000},
        {"compress_rope_theta": 7000},
        {"rope_parameters__main__rope_theta": GONE},
        {"rope_parameters__compress__rope_theta": GONE},
        {"rope_parameters__main__rope_theta": GONE, "rope_theta": GONE},
        {"rope_parameters__compress__rope_type": "default"},
        {"rope_parameters__compress__attention_factor": GONE},
        {"rope_parameters__compress__attention_factor": 1.3},
        {"rope_parameters__compress__truncate": False},
        {"rope_parameters__main__rope_type": GONE},
        {"rope_parameters__main__partial_rotary_factor": GONE},
        {"rope_parameters__main": GONE},
        {"rope_parameters__compress": GONE},
        {"rope_parameters__rope_theta": 3.0},
        {"rope_scaling": {"type": "yarn"} | YARN},
        {"num_hidden_layers": 3},
        {"compress_rates__" + WINDOW: 0},
        {"compress_rates__" + HEAVY: GONE},
        {"compress_rates": GONE},
    ],
    "dims": [
        {"qk_rope_head_dim": GONE, "partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 0.5},
        {"qk_rope_head_dim": 8},
        {"qk_rope_head_dim": GONE},
    ],
    "names": [
        {"n_routed_experts": GONE, "num_local_experts": 8},
        {"moe_intermediate_size": GONE, "intermediate_size": 48},
        {"num_local_experts": 8},
        {"num_local_experts": 4},
        {"eos_token_id": [1, 2]},
        {"eos_token_id": None},
        {"bos_token_id": None},
        {"hidden_size": 64.0},
        {"swiglu_limit": 10},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 2},
        {"scoring_func": "sigmoid"},
    ],
}


def changed(contents, changes):
    contents = json.loads(json.dumps(contents))
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = contents
        for parent in parents:
            place = place[parent]
        if value == GONE:
            del place[name]
        else:
            place[name] = value
    return contents


def read(contents):
    try:
        config = DeepseekV4Config.from_dict(json.loads(json.dumps(contents)))
    except Exception as error:  # strict dataclasses have errors of their own
        return {"refused": re.sub(r"\s+", " ", str(error))[:200]}
    n = config.num_hidden_layers
    main, compress = (config.rope_parameters[label] for label in ("main", "compress"))
    return {
        "layer_types": config.layer_types[:n],
        "mlp_layer_types": config.mlp_layer_types[:n],
        "compress_rates": {k: config.compress_rates.get(k) for k in (SPARSE, HEAVY)},
        "rope_dim": config.qk_rope_head_dim,
        "rope_theta": main["rope_theta"],
        "main_type": main["rope_type"],
        "compress_rope_theta": compress["rope_theta"],
        "compress_type": compress["rope_type"],
        "yarn": {name: compress.get(name) for name in YARN},
        "attention_factor": compress.get("attention_factor"),
        "truncate": compress.get("truncate"),
        "n_routed_experts": config.n_routed_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "eos_token_id": config.eos_token_id,
        "fixed": [config.scoring_func, config.num_key_value_heads, config.tie_word_embeddings],
    }


def cases():
    for group, changes in GROUPS.items():
        base = "nested" if group == "nested" else "released"
        for each in changes:
            yield base, each
    pairs = (("layers", "routers"), ("layers", "rates"), ("rates", "rope"), ("dims", "rope"))
    for one, two in pairs:
        for first, second in itertools.product(GROUPS[one][::4], GROUPS[two][::4]):
            if not first.keys() & second.keys():
                yield "released", first | second


def main():
    bases = {"released": RELEASED, "nested": NESTED}
    found, seen = [], set()
    for base, changes in cases():
        contents = changed(bases[base], changes)
        if (text := json.dumps(contents, sort_keys=True)) not in seen:
            seen.add(text)
            found.append({"base": base, "changes": changes, "answer": read(contents)})
    lines = ",\n".join(json.dumps(case) for case in found)
    head = json.dumps({"transformers": transformers.__version__, "bases": bases})[:-1]
    FILE.write_text(f'{head}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(found)} cases in {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
