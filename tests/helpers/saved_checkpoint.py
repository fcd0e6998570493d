"""A checkpoint that transformers saved, under all the names that its tensors have.

The package does not read the tables below.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

import dsv4_jax as ds
from helpers.checkpoints import write_tensors

SAVED = pathlib.Path(__file__).parents[1] / "data" / "hf_saved_tiny"
NUM_LAYERS, NUM_EXPERTS = 3, 4

# What transformers saves, DeepSeek's own name, what transformers has in memory.
MODEL_NAMES = [
    ("model.embed_tokens.weight", "embed.weight", "model.embed_tokens.weight"),
    ("head.weight", "head.weight", "lm_head.weight"),
    ("model.norm.weight", "norm.weight", "model.norm.weight"),
    ("model.hc_head.hc_fn", "hc_head_fn", "model.hc_head.hc_fn"),
    ("model.hc_head.hc_base", "hc_head_base", "model.hc_head.hc_base"),
    ("model.hc_head.hc_scale", "hc_head_scale", "model.hc_head.hc_scale"),
]
# What DeepSeek and transformers, in memory, call a layer's tensors, after `layers.0.` and
# `model.layers.0.`. transformers saves them by DeepSeek's names, but for one.
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
SAVED_AS = {"attn.kv_norm.weight": "attn.norm.weight"}


def saved_tensors():
    return safetensors.numpy.load_file(SAVED / "model.safetensors")


def saved_config():
    return json.loads((SAVED / "config.json").read_text())


def write_checkpoint(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or saved_config()))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def load(folder, dtype=jnp.float32, weights="stored"):
    return ds.load_checkpoint(folder, dtype=dtype, weights=weights, progress=False)


def released_names(saved, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS):
    """DeepSeek's own names."""
    tensors = {own: saved[name] for name, own, _ in MODEL_NAMES}
    for layer in range(num_layers):
        for own in LAYER_NAMES:
            name = SAVED_AS.get(own, own)
            if f"model.layers.{layer}.{name}" in saved:
                tensors[f"layers.{layer}.{own}"] = saved[f"model.layers.{layer}.{name}"]
        for expert in range(num_experts):
            for w in ("w1", "w2", "w3"):
                own = f"layers.{layer}.ffn.experts.{expert}.{w}.weight"
                tensors[own] = saved[f"model.{own}"]
    assert len(tensors) == sum(not name.startswith("mtp.") for name in saved)
    return tensors


def names_in_memory(saved):
    """transformers' names: the experts of a layer are two tensors."""
    tensors = {memory: saved[name] for name, _, memory in MODEL_NAMES}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        for own, memory in LAYER_NAMES.items():
            name = SAVED_AS.get(own, own)
            if prefix + name in saved:
                tensors[prefix + memory] = saved[prefix + name]

        def stack(w, prefix=prefix):
            return np.stack(
                [saved[f"{prefix}ffn.experts.{e}.{w}.weight"] for e in range(NUM_EXPERTS)]
            )

        fused = np.concatenate([stack("w1"), stack("w3")], axis=1)
        tensors[prefix + "mlp.experts.gate_up_proj"] = fused
        tensors[prefix + "mlp.experts.down_proj"] = stack("w2")
    return tensors


def random_params(config, dtype=jnp.float32, seed=2):
    """No two tensors alike; not for computing."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if "tid2eid" in str(path[-1]):
            return jax.device_put(rng.integers(0, config.num_routed_experts, leaf.shape, np.int32))
        return jax.device_put(rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype))

    return jax.tree.map_with_path(draw, ds.model.param_shapes(config, dtype))


def assert_same(actual, expected):
    """Bit for bit, with structure and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(actual)[0], jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
