"""Writes hf_saved_tiny/: a checkpoint as transformers saves it, and the logits it computes.

Run by hand, where torch is installed (python 3.11, torch==2.13.0, transformers==5.23.0 wrote the
committed files); the tests only read them:

    python tests/data/make_hf_saved.py

One layer of each attention type, the first routed by hash; every parameter is random, of
`helpers.oracle.draw_weights`. Beside what `save_pretrained` writes:

    logits.npz    token_ids i32[B, T], logits f32[B, T, V], versions (JSON)
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from helpers import oracle

FOLDER = pathlib.Path(__file__).parent / "hf_saved_tiny"
SEED = 3
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 8,
    "index_n_heads": 32,  # with few heads all may be rectified, and scores of exactly 0 tie
    "index_head_dim": 8,
    "index_topk": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "hc_mult": 2,
    "compress_rope_theta": 160_000.0,
    "rope_parameters": oracle.yarn(16.0, 65_536),
    "eos_token_id": [1, 5],
    "attn_implementation": "eager",
}


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    config = DeepseekV4Config(**CONFIG)
    model = DeepseekV4ForCausalLM(config).eval()
    weights = oracle.draw_weights(config.to_dict(), SEED)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {name: array.shape for name, array in weights.items()}
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    ids = np.random.default_rng(SEED + 1).integers(0, config.vocab_size, (2, 40))
    logits = model(torch.from_numpy(ids), use_cache=False).logits
    shutil.rmtree(FOLDER, ignore_errors=True)
    model.save_pretrained(FOLDER)
    (FOLDER / "model.safetensors").chmod(0o644)
    versions = {module.__name__: module.__version__ for module in (np, torch, transformers)}
    np.savez_compressed(
        FOLDER / "logits.npz",
        token_ids=ids.astype(np.int32),
        logits=logits.float().numpy(),
        versions=json.dumps(versions),
    )
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{FOLDER}: {size / 1e3:.0f} kB, logits up to {logits.abs().max():.1f}")


if __name__ == "__main__":
    main()
