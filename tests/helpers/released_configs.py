"""`config.json` of releases, and one in the form that transformers writes."""

import copy
import dataclasses
import json
import pathlib

from dsv4_jax.config import DSV4Config, YarnScaling
from dsv4_jax.config.layer_types import AttentionType, RouterType

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
HASH, LEARNED = RouterType.HASH, RouterType.LEARNED
SAVED = pathlib.Path(__file__).parents[1] / "data" / "hf_saved_tiny"
RELEASES = pathlib.Path(__file__).parents[1] / "data" / "releases"
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
# Those of August and July as they are released, with DSpark stages.
FLASH_0731 = json.loads((RELEASES / "flash-0731.json").read_text())
PRO_0813 = json.loads((RELEASES / "pro-0813.json").read_text())
# What V4-Flash-Vision-Exp adds to it.
VISION_FIELDS = {
    "vision_n_layers": 32,
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "vision_patch_size": 14,
    "vision_rope_theta": 10000,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147456,
    "vision_max_wh_ratio": 8,
}
FLASH_VISION = FLASH_0731 | {"num_nextn_predict_layers": 3} | VISION_FIELDS
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
