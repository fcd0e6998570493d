"""Header and config of what transformers writes of a model that it quantised itself.

    python tests/data/make_transformers_fp8.py
    (an environment with transformers 5.24.0, accelerate and torch 2.13.0 for CPUs)

transformers quantises on a GPU alone, and asks for one first; the question is left out here, and
what is written is the same. All sizes are multiples of 128, since others stay dense.
"""

import json
import pathlib
import tempfile

import torch
from safetensors import safe_open
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

FILE = pathlib.Path(__file__).with_name("transformers_fp8.json")
SIZES = {
    "vocab_size": 8,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "num_attention_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 16,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_nextn_predict_layers": 0,
}


def main():
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **options: None
    found = {}
    with tempfile.TemporaryDirectory() as root:
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**SIZES))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.to(torch.bfloat16).save_pretrained(f"{root}/dense")
        for scales in ("float", "ue8m0"):
            quantised = DeepseekV4ForCausalLM.from_pretrained(
                f"{root}/dense",
                quantization_config=FineGrainedFP8Config(scale_fmt=scales),
                dtype=torch.bfloat16,
            )
            folder = pathlib.Path(root, scales)
            quantised.save_pretrained(folder)
            config = json.loads((folder / "config.json").read_text())
            with safe_open(folder / "model.safetensors", "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                tensors = {n: [s.get_dtype(), s.get_shape()] for n, s in slices.items()}
            found[scales] = {"config": config, "tensors": tensors}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
