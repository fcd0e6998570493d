"""Small checkpoints with DSpark stages, in the form of V4-Flash-0731."""

import dataclasses
import json

import ml_dtypes
import numpy as np

import dsv4_jax as ds
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.config.write_json import write_config
from helpers.checkpoints import random_fp8, random_scale, released_tensors, write_tensors

SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
HASH, LEARNED = ds.RouterType.HASH, ds.RouterType.LEARNED
TRUNK = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(SWA, CSA, HCA, CSA),
    router_types=(HASH, LEARNED, LEARNED, LEARNED),
    num_mtp_layers=0,
)
DRAFT = DSparkConfig(
    block_size=5, markov_rank=16, noise_token_id=95, target_layers=(1, 2, 3), num_stages=3
)


def dspark_config(config=TRUNK, draft=DRAFT):
    """As 0731 has it: ratios with a 0 for each stage, and one block announced."""
    fields = write_config(config)
    del fields["layer_types"], fields["mlp_layer_types"]
    ratios = [0 if attn == SWA else config.compression_ratio(attn) for attn in config.layer_types]
    return fields | {
        "compress_ratios": ratios + [0] * draft.known_stages,
        "num_hash_layers": config.router_types.count(HASH),
        "num_nextn_predict_layers": 1,
        "dspark_block_size": draft.block_size,
        "dspark_markov_rank": draft.markov_rank,
        "dspark_noise_token_id": draft.noise_token_id,
        "dspark_target_layer_ids": list(draft.target_layers),
    }


def stage_table(config, draft):
    """{name: (format, shape)} of the stages as they are released, from the published headers.

    Formats are "FP8" and "FP4", which have scales beside them, "BF16" and "F32".
    """
    d, streams = config.hidden_size, config.hc_mult
    heads, latent, width = config.num_attention_heads, config.q_lora_rank, config.head_dim
    grouped, inner = config.o_groups * config.o_lora_rank, config.moe_intermediate_size
    mix = (2 + streams) * streams
    stage = {
        "attn_norm.weight": ("BF16", (d,)),
        "ffn_norm.weight": ("BF16", (d,)),
        "attn.attn_sink": ("F32", (heads,)),
        "attn.wq_a.weight": ("FP8", (latent, d)),
        "attn.q_norm.weight": ("BF16", (latent,)),
        "attn.wq_b.weight": ("FP8", (heads * width, latent)),
        "attn.wkv.weight": ("FP8", (width, d)),
        "attn.kv_norm.weight": ("BF16", (width,)),
        "attn.wo_a.weight": ("FP8", (grouped, heads * width // config.o_groups)),
        "attn.wo_b.weight": ("FP8", (d, grouped)),
        "ffn.gate.weight": ("BF16", (config.num_routed_experts, d)),
        "ffn.gate.bias": ("F32", (config.num_routed_experts,)),
    }
    for sublayer in ("attn", "ffn"):
        stage[f"hc_{sublayer}_fn"] = ("F32", (mix, streams * d))
        stage[f"hc_{sublayer}_base"] = ("F32", (mix,))
        stage[f"hc_{sublayer}_scale"] = ("F32", (3,))
    shapes = {"w1": (inner, d), "w2": (d, inner), "w3": (inner, d)}
    for w, shape in shapes.items():
        stage[f"ffn.shared_experts.{w}.weight"] = ("FP8", shape)
        for expert in range(config.num_routed_experts):
            stage[f"ffn.experts.{expert}.{w}.weight"] = ("FP4", shape)
    table = {
        f"mtp.{s}.{name}": entry for s in range(draft.num_stages) for name, entry in stage.items()
    }
    last, rank = f"mtp.{draft.num_stages - 1}.", draft.markov_rank
    return table | {
        "mtp.0.main_proj.weight": ("FP8", (d, len(draft.target_layers) * d)),
        "mtp.0.main_norm.weight": ("BF16", (d,)),
        f"{last}norm.weight": ("BF16", (d,)),
        f"{last}hc_head_fn": ("F32", (streams, streams * d)),
        f"{last}hc_head_base": ("F32", (streams,)),
        f"{last}hc_head_scale": ("F32", (1,)),
        f"{last}markov_head.markov_w1.weight": ("BF16", (config.vocab_size, rank)),
        f"{last}markov_head.markov_w2.weight": ("BF16", (config.vocab_size, rank)),
        f"{last}confidence_head.proj.weight": ("BF16", (1, d + rank)),
    }


def dspark_tensors(config=TRUNK, draft=DRAFT, seed=0):
    """Random ones of the stages alone, in the dtypes of the release."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, (form, shape) in stage_table(config, draft).items():
        scale = f"{name.removesuffix('.weight')}.scale"
        out, into = shape[0], shape[-1]
        if form == "FP8":
            made[name] = random_fp8(rng, shape).view(ml_dtypes.float8_e4m3fn)
            made[scale] = random_scale(rng, (-(-out // 128), -(-into // 128)), "UE8M0")
        elif form == "FP4":
            pairs = rng.integers(0, 256, (out, into // 2), dtype=np.uint8)
            made[name] = pairs.view(np.int8)
            made[scale] = random_scale(rng, (out, -(-into // 32)), "UE8M0")
        else:
            dtype = np.float32 if form == "F32" else ml_dtypes.bfloat16
            made[name] = rng.standard_normal(shape, np.float32).astype(dtype)
    return made


def write_checkpoint(folder, contents, tensors):
    """A directory with this config and these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(contents))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def write_dspark(folder, config=TRUNK, draft=DRAFT, **changes):
    """A whole checkpoint; `changes` are of its config."""
    tensors = released_tensors(config) | dspark_tensors(config, draft)
    return write_checkpoint(folder, dspark_config(config, draft) | changes, tensors)
