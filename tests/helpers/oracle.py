"""Small models with known answers: their weights, drawn with NumPy, and what transformers computed.

`tests/data/make_oracle.py` put the weights of `draw_weights` into transformers' model and wrote its
intermediates to `tests/data/oracle_<preset>.npz`. The weights are drawn again here, so the files do
not hold them. Names of weights are those of transformers' `state_dict`.
"""

import dataclasses
import functools
import json
import pathlib
import tempfile

import numpy as np

PRESETS = ("tiny", "ratios", "kernel", "flash", "pro")
MAX_VALUES = 256
_DATA = pathlib.Path(__file__).parent.parent / "data"
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def yarn(factor: float, original_positions: int) -> dict:
    """The `rope_parameters` of a transformers config."""
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": original_positions,
    }


def path(preset: str) -> pathlib.Path:
    return _DATA / f"oracle_{preset}.npz"


def weight_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model that a transformers config describes."""
    d, streams, vocab = config["hidden_size"], config["hc_mult"], config["vocab_size"]
    shapes = {
        "model.embed_tokens.weight": (vocab, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (vocab, d),
        "model.hc_head.hc_fn": (streams, streams * d),
        "model.hc_head.hc_base": (streams,),
        "model.hc_head.hc_scale": (1,),
    }
    for layer, (attn, router) in enumerate(
        zip(config["layer_types"], config["mlp_layer_types"], strict=True)
    ):
        parts = _attention_shapes(config, attn) | _moe_shapes(config, router)
        parts |= {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        for mix in ("attn_hc", "ffn_hc"):
            rows = (2 + streams) * streams
            parts |= {
                f"{mix}.fn": (rows, streams * d),
                f"{mix}.base": (rows,),
                f"{mix}.scale": (3,),
            }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention_shapes(config: dict, attn: str) -> dict[str, tuple[int, ...]]:
    d, heads, c = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    rank, groups, latent = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    shapes = {
        "sinks": (heads,),
        "q_a_proj.weight": (rank, d),
        "q_a_norm.weight": (rank,),
        "q_b_proj.weight": (heads * c, rank),
        "kv_proj.weight": (c, d),
        "kv_norm.weight": (c,),
        "o_a_proj.weight": (groups * latent, heads // groups * c),
        "o_b_proj.weight": (d, groups * latent),
    }
    if attn in (_CSA, _HCA):
        shapes |= _compressor_shapes(config, attn, c, "compressor")
    if attn == _CSA:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        shapes |= _compressor_shapes(config, attn, index_dim, "compressor.indexer")
        shapes["compressor.indexer.q_b_proj.weight"] = (index_heads * index_dim, rank)
        shapes["compressor.indexer.scorer.weights_proj.weight"] = (index_heads, d)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _compressor_shapes(config: dict, attn: str, dim: int, at: str) -> dict[str, tuple[int, ...]]:
    width = 2 * dim if attn == _CSA else dim
    return {
        f"{at}.kv_proj.weight": (width, config["hidden_size"]),
        f"{at}.gate_proj.weight": (width, config["hidden_size"]),
        f"{at}.position_bias": (config["compress_rates"][attn], width),
        f"{at}.kv_norm.weight": (dim,),
    }


def _moe_shapes(config: dict, router: str) -> dict[str, tuple[int, ...]]:
    d, width = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["n_routed_experts"]
    shapes = {
        "gate.weight": (experts, d),
        "experts.gate_up_proj": (experts, 2 * width, d),
        "experts.down_proj": (experts, d, width),
        "shared_experts.gate_proj.weight": (width, d),
        "shared_experts.up_proj.weight": (width, d),
        "shared_experts.down_proj.weight": (d, width),
    }
    if router == "hash_moe":
        shapes["gate.tid2eid"] = (config["vocab_size"], config["num_experts_per_tok"])
    else:
        shapes["gate.e_score_correction_bias"] = (experts,)
    return {f"mlp.{name}": shape for name, shape in shapes.items()}


def draw_weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Random weights, f32 (tables i64); no norm, bias, sink or table is left trivial."""
    rng = np.random.default_rng(seed)
    shapes = weight_shapes(config)
    return {name: _draw(rng, name, shapes[name], config) for name in sorted(shapes)}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: dict) -> np.ndarray:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "tid2eid":  # distinct experts of each token id
        order = np.argsort(rng.random((shape[0], config["n_routed_experts"])), axis=-1)
        return np.ascontiguousarray(order[:, : shape[1]])
    if leaf in ("scale", "hc_scale"):
        return 0.5 + rng.random(shape, dtype=np.float32)
    noise = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1 + np.float32(0.2) * noise
    if leaf in ("base", "hc_base", "sinks", "e_score_correction_bias"):
        return np.float32(0.5) * noise
    if leaf == "position_bias" or name.endswith("embed_tokens.weight"):
        return noise
    # What a sublayer adds is small, so that streams, and what rounding does to them, hardly grow.
    gain = 0.5 if "o_b_proj" in name or "down_proj" in name else 1.0
    return noise * np.float32(gain * shape[-1] ** -0.5)


def weight_sums(weights: dict[str, np.ndarray]) -> np.ndarray:
    """f64[tensors], in the order of names: tells whether another NumPy draws the same weights."""
    return np.array([weights[name].sum(dtype=np.float64) for name in sorted(weights)])


def chosen_tokens(config: dict, num_tokens: int) -> np.ndarray:
    """The first and last tokens and those around every boundary of windows and ring."""
    csa, hca = (config["compress_rates"][attn] for attn in (_CSA, _HCA))
    boundaries = (csa, 2 * csa, config["sliding_window"], hca, 2 * hca)
    tokens = {0, num_tokens - 2, num_tokens - 1} | {b + i for b in boundaries for i in (-1, 0)}
    return np.array(sorted(t for t in tokens if t < num_tokens))


def chosen_entries(tokens: np.ndarray, compression_ratio: int) -> np.ndarray:
    """The youngest entry that each chosen token sees (entry 0 where there is none)."""
    return np.unique(np.maximum((tokens + 1) // compression_ratio - 1, 0))


def sample(array: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
    """[B, T, ...] -> [B, P, n]: chosen rows, and of long ones every k-th value (k odd)."""
    picked = np.asarray(array)[:, rows]
    picked = picked.reshape(*picked.shape[:2], -1)
    stride = -(-picked.shape[-1] // MAX_VALUES)
    return picked[..., :: stride | 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleCase:
    """One preset.

    Attributes:
      preset: its name.
      config: DSV4Config.
      params: DSV4Params, f32, from the drawn weights.
      hf_config: the config as transformers writes it.
      data: arrays of the file, described in `make_oracle.py`.
    """

    preset: str
    config: object
    params: object
    hf_config: dict
    data: dict[str, np.ndarray]


@functools.cache
def load_case(preset: str) -> OracleCase:
    # Imported here, since make_oracle.py runs where there is no JAX.
    import safetensors.numpy

    from dsv4_jax.checkpoint.load import load_checkpoint

    with np.load(path(preset)) as file:
        data = dict(file)
    hf_config = json.loads(str(data["config"]))
    weights = draw_weights(hf_config, int(data["seed"]))
    np.testing.assert_allclose(
        weight_sums(weights),
        data["weight_sums"],
        rtol=1e-4,
        atol=1e-4,
        err_msg="this NumPy draws other weights than the one that wrote the file; write it again",
    )
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "config.json").write_text(json.dumps(hf_config))
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        config, params = load_checkpoint(folder, dtype=np.float32)
    return OracleCase(preset=preset, config=config, params=params, hf_config=hf_config, data=data)
