"""Reads `config.json`: the released form and the one that transformers writes."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from dsv4_jax.config.checkpoint_folder import find_file
from dsv4_jax.config.json_file import read_json_object
from dsv4_jax.config.kinds import Fields, ListOf, OneOrMore, Real, Whole, Word, show
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.limits import KINDS, MAX_END_TOKENS, MAX_LAYERS, RATE, YARN_KINDS
from dsv4_jax.config.yarn import YarnScaling

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA


LAYER_TYPE_NAMES = {
    "sliding_attention": SWA,
    "compressed_sparse_attention": CSA,
    "heavily_compressed_attention": HCA,
}


ROUTER_TYPE_NAMES = {"moe": RouterType.LEARNED, "hash_moe": RouterType.HASH}


# Fields that have one name in both forms: theirs, ours.
SAME_NAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "sliding_window",
    "index_n_heads": "indexer_num_heads",
    "index_head_dim": "indexer_head_dim",
    "index_topk": "indexer_top_k",
    "n_routed_experts": "num_routed_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "max_position_embeddings": "max_position_embeddings",
}


OPTIONAL = {
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "rms_norm_eps",
    "bos_token_id": "bos_token_id",
}


# The one value of each that this model family has; anything else is another model.
FIXED = {
    "model_type": "deepseek_v4",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


_PARTIAL = Real(0.0, 1.0)
_STAGES = Whole(0, 64)
_ROPE_TABLE = Fields(
    {
        "rope_type": Word(),
        "type": Word(),
        "rope_theta": KINDS["rope_theta"],
        "partial_rotary_factor": _PARTIAL,
        "factor": YARN_KINDS["factor"],
        "original_max_position_embeddings": YARN_KINDS["original_max_positions"],
        "beta_fast": YARN_KINDS["beta_fast"],
        "beta_slow": YARN_KINDS["beta_slow"],
        "attention_factor": Real(0.0, 1e6),
    }
)
_FIELDS = Fields(
    {theirs: KINDS[ours] for theirs, ours in SAME_NAME.items()}
    | {theirs: KINDS[ours] for theirs, ours in OPTIONAL.items() if ours in KINDS}
    | {
        "num_hidden_layers": Whole(1, MAX_LAYERS),
        "num_nextn_predict_layers": _STAGES,
        "num_hash_layers": Whole(0, MAX_LAYERS),
        "layer_types": ListOf(Word(tuple(LAYER_TYPE_NAMES)), MAX_LAYERS + _STAGES.most),
        "mlp_layer_types": ListOf(Word(tuple(ROUTER_TYPE_NAMES)), MAX_LAYERS + _STAGES.most),
        "compress_ratios": ListOf(Whole(0, RATE.most), MAX_LAYERS + _STAGES.most),
        "compress_rate_csa": RATE,
        "compress_rate_hca": RATE,
        "qk_rope_head_dim": KINDS["rope_dim"],
        "partial_rotary_factor": _PARTIAL,
        "rope_theta": KINDS["rope_theta"],
        "compress_rope_theta": KINDS["compress_rope_theta"],
        "rope_scaling": _ROPE_TABLE,
        "rope_parameters": Fields(
            _ROPE_TABLE.kinds | {"main": _ROPE_TABLE, "compress": _ROPE_TABLE}
        ),
    }
)
"""Every field that is read; others are ignored."""


def read_fields(
    source: str | os.PathLike[str] | dict[str, Any], *, follow_links: bool = False
) -> tuple[str, dict[str, Any]]:
    """Where a config comes from, and the fields of a `DSV4Config`; see `DSV4Config.from_hf`."""
    if isinstance(source, dict):
        where, contents = "config.json", source
    else:
        file = _find(pathlib.Path(source), follow_links=follow_links)
        where, contents = str(file), read_json_object(file)
    try:
        return where, _our_fields(contents)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _our_fields(contents: dict[str, Any]) -> dict[str, Any]:
    for name, value in FIXED.items():
        given = contents.get(name, value)
        if type(given) is not type(value) or given != value:
            raise ValueError(f"{name} must be {value!r} in a DeepSeek-V4 config, got {show(given)}")
    data = _FIELDS.read(contents, "")
    fields = {ours: _require(data, theirs) for theirs, ours in SAME_NAME.items()}
    fields |= {ours: data[name] for name, ours in OPTIONAL.items() if name in data}
    num_layers = _require(data, "num_hidden_layers")
    num_mtp = data.get("num_nextn_predict_layers", 0)
    layer_types, rates = _layer_types(data, num_layers, num_mtp, _rates(contents, data))
    return {
        **fields,
        "layer_types": layer_types,
        "router_types": _router_types(data, num_layers, num_mtp),
        "rope_dim": _rope_dim(data),
        "csa_compression_ratio": rates[CSA],
        "hca_compression_ratio": rates[HCA],
        "num_mtp_layers": int(num_mtp == 1),
        **_tokens(contents, data["vocab_size"]),
        **_rope(data),
    }


def _tokens(contents: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The first token of a text and those that end one, all of the vocabulary."""
    token = Whole(0, vocab_size - 1, f"vocab_size={vocab_size}")
    data = Fields(
        {"bos_token_id": token, "eos_token_id": OneOrMore(ListOf(token, MAX_END_TOKENS))}
    ).read(contents, "")
    return {
        "bos_token_id": data.get("bos_token_id"),
        "eos_token_ids": tuple(data.get("eos_token_id", ())),
    }


def _find(path: pathlib.Path, *, follow_links: bool) -> pathlib.Path:
    file = find_file(path, "config.json", follow_links=follow_links) if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"no config.json at {file}; pass a checkpoint directory, a config.json, or its contents"
        )
    return file


def _require(data: dict[str, Any], name: str) -> Any:
    if name not in data:
        raise ValueError(f"{name} is missing, which a DeepSeek-V4 config must have")
    return data[name]


def _agree(name: str, value: Any, other_name: str, other: Any) -> None:
    if value is not None and other is not None and value != other:
        raise ValueError(
            f"{name} and {other_name} contradict each other: {show(value)} and {show(other)}"
        )


def _trunk(name: str, values: list[Any], num_layers: int, num_mtp: int, padding: Any) -> list[Any]:
    """Cuts draft layers off a per-layer list.

    A list may name the trunk alone, or the draft blocks too; releases with several draft stages
    list one window layer each. The one block that `draft_layer` describes is `padding`.
    """
    extra = values[num_layers:]
    unlike = any(value != padding for value in extra)
    if len(values) < num_layers or (unlike and (num_mtp == 1 or len(extra) != num_mtp)):
        raise ValueError(
            f"{name} must have num_hidden_layers={num_layers} entries, or those and {padding!r} "
            f"for each of the draft's (num_nextn_predict_layers={num_mtp}), got {len(values)}"
            + (f", ending in {show(extra)}" if extra else "")
        )
    return values[:num_layers]


def _layer_types(
    data: dict[str, Any], num_layers: int, num_mtp: int, rates: dict[AttentionType, int]
) -> tuple[tuple[AttentionType, ...], dict[AttentionType, int]]:
    """The attention type of each trunk layer, and the compression ratio of each compressed type."""
    listed = ratios = None
    if (names := data.get("layer_types")) is not None:
        types = [LAYER_TYPE_NAMES[name] for name in names]
        listed = tuple(_trunk("layer_types", types, num_layers, num_mtp, SWA))
    if (numbers := data.get("compress_ratios")) is not None:
        trunk = _trunk("compress_ratios", numbers, num_layers, num_mtp, 0)
        by_ratio, rates = _types_of_ratios(trunk, rates)
        ratios = tuple(by_ratio[number] for number in trunk)
    _agree("layer_types", listed, "compress_ratios", ratios)
    layer_types = listed or ratios
    if layer_types is None:
        raise ValueError("layer_types (or compress_ratios) is missing, one per layer")
    return layer_types, {CSA: 4, HCA: 128} | rates


def _rates(contents: dict[str, Any], data: dict[str, Any]) -> dict[AttentionType, int]:
    rates: dict[AttentionType, int] = {}
    given = contents.get("compress_rates")
    if not isinstance(given, dict | None):
        raise ValueError(f"compress_rates must be an object of layer types, got {show(given)}")
    for name, rate in (given or {}).items():
        if name not in LAYER_TYPE_NAMES:
            raise ValueError(f"compress_rates must name layer types, got {show(name)}")
        rates[LAYER_TYPE_NAMES[name]] = RATE.read(rate, f"compress_rates.{name}")
    for attn, name in ((CSA, "compress_rate_csa"), (HCA, "compress_rate_hca")):
        if (rate := data.get(name)) is not None:
            _agree(name, rate, "compress_rates", rates.get(attn))
            rates[attn] = rate
    return rates


def _types_of_ratios(
    ratios: list[int], rates: dict[AttentionType, int]
) -> tuple[dict[int, AttentionType], dict[AttentionType, int]]:
    """What each number of `compress_ratios` means: 0 SWA, the smaller ratio CSA, the larger HCA."""
    known = {CSA: 4, HCA: 128} | rates
    distinct = sorted(set(ratios) - {0})
    by_ratio = {0: SWA} | {rate: attn for attn, rate in known.items()}
    is_ambiguous = known[CSA] == known[HCA] and known[CSA] in distinct
    if all(ratio in by_ratio for ratio in distinct) and not is_ambiguous:
        return by_ratio, rates
    if len(distinct) == 2 and not rates:
        return dict(zip((0, *distinct), (SWA, CSA, HCA), strict=True)), dict(
            zip((CSA, HCA), distinct, strict=True)
        )
    raise ValueError(
        f"compress_ratios holds {show(distinct)}, which do not tell CSA from HCA; "
        f"add compress_rates with the rate of each layer type (known: {known})"
    )


def _router_types(data: dict[str, Any], num_layers: int, num_mtp: int) -> tuple[RouterType, ...]:
    names, num_hash = data.get("mlp_layer_types"), data.get("num_hash_layers")
    counted = None
    if num_hash is not None:
        if not 0 <= num_hash <= num_layers:
            raise ValueError(f"num_hash_layers must be 0 to {num_layers}, got {num_hash}")
        counted = (RouterType.HASH,) * num_hash + (RouterType.LEARNED,) * (num_layers - num_hash)
    if names is None:
        if counted is None:
            raise ValueError("mlp_layer_types (or num_hash_layers) is missing")
        return counted
    listed = tuple(
        ROUTER_TYPE_NAMES[name]
        for name in _trunk("mlp_layer_types", names, num_layers, num_mtp, "moe")
    )
    _agree("mlp_layer_types", listed, "num_hash_layers", counted)
    return listed


def _rope_dim(data: dict[str, Any]) -> int:
    head_dim = _require(data, "head_dim")
    dims = {"qk_rope_head_dim": data.get("qk_rope_head_dim")}
    factors = {"partial_rotary_factor": data.get("partial_rotary_factor")}
    nested = data.get("rope_parameters") or {}
    for label in ("main", "compress"):
        if isinstance(nested.get(label), dict):
            name = f"rope_parameters.{label}.partial_rotary_factor"
            factors[name] = nested[label].get("partial_rotary_factor")
    dims |= {name: int(head_dim * f) for name, f in factors.items() if f is not None}
    given = {name: dim for name, dim in dims.items() if dim is not None}
    if not given:
        raise ValueError("qk_rope_head_dim (or partial_rotary_factor) is missing")
    first = next(iter(given))
    for name, dim in given.items():
        _agree(first, given[first], name, dim)
    return given[first]


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Both RoPE bases and the compress table's YaRN, from whichever form holds them."""
    parameters = data.get("rope_parameters") or {}
    is_nested = "main" in parameters or "compress" in parameters
    if is_nested:
        for label in ("main", "compress"):
            if not isinstance(parameters.get(label), dict):
                raise ValueError(f"rope_parameters.{label} is missing beside the other table")
        main, compress = parameters["main"], parameters["compress"]
        place = "rope_parameters.compress"
    else:
        main, compress = {}, parameters or data.get("rope_scaling") or {}
        place = "rope_parameters" if parameters else "rope_scaling"
    thetas = {}
    for name, label, table in (
        ("rope_theta", "main", main),
        ("compress_rope_theta", "compress", compress),
    ):
        nested = table.get("rope_theta") if is_nested else None
        _agree(name, data.get(name), f"rope_parameters.{label}.rope_theta", nested)
        thetas[name] = float(nested if nested is not None else _require(data, name))
    if main.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters.main.rope_type must be 'default', got {show(main)}")
    scaling = _yarn(compress, place)
    released = data.get("rope_scaling")
    if released and _yarn(released, "rope_scaling") != scaling:
        raise ValueError(
            f"rope_parameters and rope_scaling contradict each other: {show(compress)} and "
            f"{show(released)}"
        )
    return thetas | {"rope_scaling": scaling}


def _yarn(table: dict[str, Any], place: str) -> YarnScaling | None:
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{place}.rope_type must be 'yarn' or 'default', got {show(kind)}")
    for name in ("factor", "original_max_position_embeddings"):
        if table.get(name) is None:
            raise ValueError(f"{place}, which is yarn, lacks {name}")
    if table.get("attention_factor", 1.0) != 1.0:
        raise ValueError(
            f"{place}.attention_factor must be 1.0, got {show(table['attention_factor'])}"
        )
    return YarnScaling(
        factor=float(table["factor"]),
        original_max_positions=int(table["original_max_position_embeddings"]),
        beta_fast=float(table.get("beta_fast", 32.0)),
        beta_slow=float(table.get("beta_slow", 1.0)),
    )
