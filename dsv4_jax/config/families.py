"""Which model a `config.json` is of, and one name for each of its fields."""

from __future__ import annotations

from typing import Any

from dsv4_jax.config.kinds import agree

V4, V41 = "deepseek_v4", "deepseek_v41"
MODEL_TYPES = {name: family for family in (V4, V41) for name in (family, f"{family}_text")}
"""Family of each `model_type`: those of whole models, and of the text models inside."""

_V41_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
"""Other names of DeepSeek-V4.1's fields, as its inference code and some converters have them."""


def is_v41(contents: dict[str, Any]) -> bool:
    """Whether the text part of a `config.json` is of DeepSeek-V4.1."""
    return contents.get("model_type") == V41


def with_one_name(contents: dict[str, Any]) -> dict[str, Any]:
    """The text part of a `config.json`, each field of DeepSeek-V4.1 under its first name.

    Where no draft is announced, which needs a block size and stages, fields of a draft are left
    out: configs of models without one keep some.

    Raises:
      ValueError: two names of a field have different values.
    """
    if not is_v41(contents):
        return contents
    for other, name in _V41_NAMES.items():
        if (value := contents.get(other)) is not None:
            agree(other, value, name, contents.get(name))
            contents = {n: v for n, v in contents.items() if n != other} | {name: value}
    if not (contents.get("dspark_block_size") and contents.get("num_nextn_predict_layers")):
        contents = {n: v for n, v in contents.items() if not n.startswith("dspark_")}
        if contents.get("num_nextn_predict_layers"):
            contents |= {"num_nextn_predict_layers": 0}
    return contents
