"""Small DeepSeek-V4.1 models: their configs, a tokenizer, weights drawn with NumPy, and folders.

`tests/data/make_v41_oracle.py` records what these models compute; weights are drawn again here, so
that the files do not hold them.
"""

import copy
import functools
import json
import pathlib
import zlib

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsv4_jax.checkpoint.engram_tables import list_tables
from dsv4_jax.checkpoint.names import all_targets
from dsv4_jax.config import DSV4Config
from dsv4_jax.engram import normalize_ids
from dsv4_jax.model import param_shapes
from helpers.checkpoints import random_fp8, random_scale, released_tensors, write_tensors

DATA = pathlib.Path(__file__).parents[1] / "data"

COMMON = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 160,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 32,  # with few heads scores of exactly 0 tie
    "index_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [],
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "dspark_noise_token_id": 7,
    "dspark_markov_rank": 8,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
PRESETS = {
    # Every kind of layer, a window that wraps, a clamp that is hit, candidates that leave entries
    # out, and a selector above them.
    "tiny": {
        "num_hidden_layers": 8,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 2,
        "index_topk": 4,
        "sliding_window": 8,
        "swiglu_limit": 1.5,
        "engram_layer_ids": [1, 4],
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 61,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 3,
        "dspark_target_layer_ids": [5, 6, 7],
    },
    # The released window and blocks of candidates; readers and selectors between sources.
    "ratios": {
        "num_hidden_layers": 12,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 5, 7],
        "index_source_layer_ids": [2, 5, 7, 9, 11],
        "candidate_source_layer_id": 7,
        "candidate_topk_blocks": 10,
        "candidate_block_size": 8,
        "index_topk": 48,
        "sliding_window": 128,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [9, 10, 11],
    },
    # The release's 3 x 8 columns of a table; no candidates, no draft.
    "engram": {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 0, 2, 1],
        "kv_source_layer_ids": [2, 3],
        "index_source_layer_ids": [2, 3],
        "candidate_source_layer_id": -1,
        "candidate_topk_blocks": 0,
        "candidate_block_size": 0,
        "index_topk": 8,
        "sliding_window": 16,
        "engram_layer_ids": [1, 3],
        "engram_n_heads": 8,
        "engram_head_dim": 32,
        "engram_vocab_size": 97,
        "num_nextn_predict_layers": 0,
    },
}
"""What each adds to `COMMON`."""
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_ALIKE = ["a", "A", "Ġa", "ĠA", "Ã¡", "the", "The", "ĠTHE", "Ġ", "ĠĠ", "Ċ", "ĊĊ", "ĠĊ", "Ã", "Ã©"]
"""Texts, in the letters of byte-level tokenizers, that differ in case, accents and spaces alone."""


@functools.cache
def tokenizer_json(vocab_size=160):
    """A byte-level tokenizer, some of whose tokens are normalised alike."""
    words = ["<s>", "</s>", "<pad>", *_ALIKE]
    words += [
        letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in words
    ]
    words += [f"w{number}" for number in range(vocab_size)]
    vocab = {word: token for token, word in enumerate(words[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def contents(preset, *, quantized=False, **changes):
    """The `config.json` of a preset, nested as the release has it."""
    text = copy.deepcopy(COMMON | PRESETS[preset] | changes)
    if text["engram_layer_ids"]:
        text["engram_compressed_vocab_size"] = int(normalize_ids(tokenizer_json()).max()) + 1
        columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
        rows = _primes(text["engram_vocab_size"], columns * len(text["engram_layer_ids"]))
        text["engram_num_embeddings"] = [
            sum(rows[n * columns : (n + 1) * columns]) for n in range(len(text["engram_layer_ids"]))
        ]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": text,
        **({"quantization_config": QUANTIZATION} if quantized else {}),
    }


def _primes(least, count):
    found = []
    while len(found) < count:
        if all(least % divisor for divisor in range(2, int(least**0.5) + 1)):
            found.append(least)
        least += 1
    return found


def draw_weights(config, seed):
    """f32 of every tensor of a model by its name in the release, tables included."""
    shapes = {name: t.shape for name, t in all_targets(config, param_shapes(config)).items()}
    shapes |= {e.name: e.shape for e in list_tables(config) if e.name.endswith("weight")}
    found = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])  # whatever the order
        leaf, values = name.rsplit(".", 1)[-1], rng.standard_normal(shape).astype(np.float32)
        if "norm" in name or leaf in ("q_weight", "k_weight"):
            values = 1 + np.float32(0.2) * values
        elif leaf in ("attn_sink", "bias") or leaf.endswith("_base"):
            values *= np.float32(0.5)
        elif leaf.endswith("_scale"):
            values = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        elif "embed.weight" not in name:
            values *= np.float32(shape[-1] ** -0.5)
        found[name] = values
    return found


def write_folder(folder, preset, *, seed=0, drop=(), **changes):
    """A checkpoint in f32: what `load_checkpoint` reads and the oracle has."""
    said = contents(preset, **changes)
    tensors = draw_weights(DSV4Config.from_hf(said), seed)
    return _write(folder, said, {n: a for n, a in tensors.items() if n not in drop})


def write_released(folder, preset="tiny", *, seed=0, images=False, **changes):
    """A checkpoint in the formats of the release, and what is in its file."""
    said = contents(preset, quantized=True, **changes)
    config, rng = DSV4Config.from_hf(said), np.random.default_rng(seed)
    tensors = released_tensors(config, seed=seed)
    codes = None
    for entry in list_tables(config):
        if entry.name.endswith("weight"):
            codes = random_fp8(rng, entry.shape).view(ml_dtypes.float8_e4m3fn)
            tensors[entry.name] = codes
        else:
            tensors[entry.name] = random_scale(rng, entry.shape, "UE8M0")
    if images:
        said["vision_config"] = {"num_hidden_layers": 1}
        tensors |= {
            name: np.zeros(8, np.float32)
            for name in ("vision.proj.weight", "aligner.w1.weight", "image_newline")
        }
        tensors |= {
            f"{name}_vl": array for name, array in tensors.items() if name.endswith("gate.bias")
        }
    return _write(folder, said, tensors), tensors


def _write(folder, said, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    write_tensors(folder / "model.safetensors", tensors)
    if said["text_config"]["engram_layer_ids"]:
        (folder / "tokenizer.json").write_text(tokenizer_json(said["text_config"]["vocab_size"]))
    return folder


def oracle_path(preset):
    return DATA / f"oracle_v41_{preset}.npz"


def weight_sums(weights):
    """Sums of all weights, by which a change of NumPy's draws is told."""
    return np.array([np.sum(array, dtype=np.float64) for _, array in sorted(weights.items())])


def sample(array):
    """[B, T, ...] -> [B, P, n]: some rows, and of each at most 40 values."""
    count = array.shape[1]
    picked = sorted({0, 1, 2, 3, count // 3, count // 2, count - 2, count - 1})
    rows = np.asarray(array)[:, picked].reshape(len(array), len(picked), -1)
    return rows[..., :: -(-rows.shape[-1] // 40) | 1]
