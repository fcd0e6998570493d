"""Reads `config.json`: the released form and the one that transformers writes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

from dsv4_jax import checks
from dsv4_jax.config.checkpoint_folder import find_file
from dsv4_jax.config.draft import MAX_STAGES, DraftKind, draft_kind, read_dspark
from dsv4_jax.config.families import V41, is_v41
from dsv4_jax.config.formats import HF_QUANT_CONFIG, check_algorithms, check_formats
from dsv4_jax.config.images import find_images, text_part
from dsv4_jax.config.json_file import read_json_object
from dsv4_jax.config.kinds import Fields, ListOf, OneOrMore, Whole, Word, agree, require, show
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.limits import COMPRESSION_RATIO, KINDS, MAX_END_TOKENS, MAX_LAYERS
from dsv4_jax.config.read_rope import PARTIAL, ROPE_TABLE, read_rope, read_rope_dim
from dsv4_jax.config.v41 import FIXED_V41, V41_FIELDS, WEIGHT_BLOCK, read_v41
from dsv4_jax.regular_files import has_regular_file, show_path

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


# Other names of fields, which transformers takes as well.
ALIASES = {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}


# The one value of each that this model family has; anything else is another model.
FIXED = {
    "model_type": "deepseek_v4",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


_MAX_CONFIG_BYTES = 2**24
"""Of a `config.json`; the largest released one has 3 KB, and lists of modules may be long."""

_STAGES = Whole(0, MAX_STAGES)
_FIELDS = Fields(
    {theirs: KINDS[ours] for theirs, ours in SAME_NAME.items()}
    | {theirs: KINDS[ours] for theirs, ours in OPTIONAL.items() if ours in KINDS}
    | {
        **{alias: KINDS[SAME_NAME[name]] for alias, name in ALIASES.items()},
        "num_hidden_layers": Whole(1, MAX_LAYERS),
        "num_nextn_predict_layers": _STAGES,
        "num_hash_layers": Whole(0, MAX_LAYERS),
        "layer_types": ListOf(Word(tuple(LAYER_TYPE_NAMES)), MAX_LAYERS + _STAGES.most),
        "mlp_layer_types": ListOf(Word(tuple(ROUTER_TYPE_NAMES)), MAX_LAYERS + _STAGES.most),
        "compress_ratios": ListOf(Whole(0, COMPRESSION_RATIO.most), MAX_LAYERS + _STAGES.most),
        "compress_rate_csa": COMPRESSION_RATIO,
        "compress_rate_hca": COMPRESSION_RATIO,
        "qk_rope_head_dim": KINDS["rope_dim"],
        "partial_rotary_factor": PARTIAL,
        "rope_theta": KINDS["rope_theta"],
        "compress_rope_theta": KINDS["compress_rope_theta"],
        "rope_scaling": ROPE_TABLE,
        "rope_parameters": Fields(ROPE_TABLE.kinds | {"main": ROPE_TABLE, "compress": ROPE_TABLE}),
    }
)
"""Every field that is read; others are ignored."""
_V41_FIELDS = Fields(_FIELDS.kinds | V41_FIELDS)
"""Of DeepSeek-V4.1."""


def read_contents(
    source: str | os.PathLike[str] | dict[str, Any], *, follow_links: bool = False
) -> tuple[str, dict[str, Any]]:
    """Where a config comes from, and all that it says; see `DSV4Config.from_hf`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it cannot be read, or a `HF_QUANT_CONFIG` beside it names a format that is not
        supported.
    """
    if isinstance(source, dict):
        return "config.json", source
    if not isinstance(source, str | os.PathLike):
        checks.refuse("source", "a path, or the contents of a config.json", source)
    path = pathlib.Path(source)
    file = _find(path, follow_links=follow_links)
    if path.is_dir():
        beside = find_file(path, HF_QUANT_CONFIG, follow_links=follow_links)
        if beside.is_file():
            _locate(show_path(beside), check_algorithms, _read_config(beside), "")
    return show_path(file), _read_config(file)


def _read_config(file: pathlib.Path) -> dict[str, Any]:
    return read_json_object(file, max_bytes=_MAX_CONFIG_BYTES)


def read_fields(
    source: str | os.PathLike[str] | dict[str, Any],
    *,
    follow_links: bool = False,
    text_only: bool = False,
    drafts: bool = True,
) -> tuple[str, dict[str, Any]]:
    """Where a config comes from, and the fields of a `DSV4Config`; see `DSV4Config.from_hf`."""
    where, contents = read_contents(source, follow_links=follow_links)
    return where, _locate(where, _our_fields, contents, text_only, drafts)


def _locate[**P, Result](
    where: str, read: Callable[P, Result], *args: P.args, **options: P.kwargs
) -> Result:
    """What is read; errors begin with the file."""
    try:
        return read(*args, **options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _our_fields(contents: dict[str, Any], text_only: bool, drafts: bool) -> dict[str, Any]:
    images, whole, contents = find_images(contents), contents, text_part(contents)
    is_of_v41 = is_v41(contents)
    _check_fixed(contents, FIXED | {"model_type": V41, **FIXED_V41} if is_of_v41 else FIXED)
    for part in (whole, contents):  # a text model inside may still say what it was made from
        check_formats(part, **({"block": WEIGHT_BLOCK} if is_of_v41 else {}))
    if images is not None and not text_only:
        raise ValueError(
            f"{images} is of a model that reads images too; its text part is read with "
            "text_only=True, and load_checkpoint loads that part"
        )
    data = (_V41_FIELDS if is_of_v41 else _FIELDS).read(contents, "")
    for alias, name in ALIASES.items():
        agree(alias, data.get(alias), name, data.get(name))
        if alias in data:
            data[name] = data[alias]
    fields = {ours: require(data, theirs) for theirs, ours in SAME_NAME.items()}
    fields |= {ours: data[name] for name, ours in OPTIONAL.items() if name in data}
    num_layers = require(data, "num_hidden_layers")
    if is_of_v41:
        layers = read_v41(contents, data, num_layers)
    else:
        types, ratios = _layer_types(data, num_layers, _compression_ratios(contents, data))
        layers = {
            "layer_types": types,
            "router_types": _router_types(data, num_layers),
            "csa_compression_ratio": ratios[CSA],
            "hca_compression_ratio": ratios[HCA],
        }
    return {
        **fields,
        **layers,
        "rope_dim": read_rope_dim(data),
        **(_draft(contents, num_layers) if drafts else {}),
        **_tokens(contents, data["vocab_size"]),
        **read_rope(data),
    }


def _check_fixed(contents: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Refuses a field whose value is another than that of the model family."""
    for name, value in fixed.items():
        given = contents.get(name, value)
        numbers = isinstance(value, float) and type(given) is int
        if not (type(given) is type(value) or numbers) or given != value:
            other = f" (or {V41!r} in a DeepSeek-V4.1 config)" if name == "model_type" else ""
            raise ValueError(
                f"{name} must be {value!r} in a DeepSeek-V4 config{other}, got {show(given)}"
            )


def _draft(contents: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of the draft."""
    dspark = read_dspark(contents)
    # A trunk that was cut below the layers that the stages read cannot have them.
    if dspark is not None and dspark.target_layers[-1] >= num_layers:
        dspark = None
    return {"num_mtp_layers": int(draft_kind(contents) == DraftKind.MTP), "dspark": dspark}


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
    if not has_regular_file(file):
        raise FileNotFoundError(
            f"no config.json at {show_path(file)}; name a directory that has one, or the file"
        )
    return file


def _trunk(name: str, values: list[Any], num_layers: int) -> list[Any]:
    """The layers of a per-layer list that are the trunk's.

    A list may go on with the draft's layers. Of a model that was cut by `num_hidden_layers` alone,
    as small copies are made, it names all layers that there were. Every tool takes the first.
    """
    if len(values) < num_layers:
        raise ValueError(
            f"{name} must have num_hidden_layers={num_layers} entries at least, got {len(values)}"
        )
    return values[:num_layers]


def _layer_types(
    data: dict[str, Any], num_layers: int, compression_ratios: dict[AttentionType, int]
) -> tuple[tuple[AttentionType, ...], dict[AttentionType, int]]:
    """The attention type of each trunk layer, and the compression ratio of each compressed type."""
    listed = ratios = None
    if (names := data.get("layer_types")) is not None:
        types = [LAYER_TYPE_NAMES[name] for name in names]
        listed = tuple(_trunk("layer_types", types, num_layers))
    if (numbers := data.get("compress_ratios")) is not None:
        trunk = _trunk("compress_ratios", numbers, num_layers)
        by_ratio, compression_ratios = _types_of_ratios(numbers, compression_ratios)
        ratios = tuple(by_ratio[number] for number in trunk)
    agree("layer_types", listed, "compress_ratios", ratios)
    layer_types = listed or ratios
    if layer_types is None:
        raise ValueError("layer_types (or compress_ratios) is missing, one per layer")
    return layer_types, {CSA: 4, HCA: 128} | compression_ratios


def _compression_ratios(contents: dict[str, Any], data: dict[str, Any]) -> dict[AttentionType, int]:
    compression_ratios: dict[AttentionType, int] = {}
    given = contents.get("compress_rates")
    if not isinstance(given, dict | None):
        raise ValueError(f"compress_rates must be an object of layer types, got {show(given)}")
    for name, number in (given or {}).items():
        if name not in LAYER_TYPE_NAMES:
            raise ValueError(f"compress_rates must name layer types, got {show(name)}")
        attn = LAYER_TYPE_NAMES[name]
        if attn != SWA:
            compression_ratios[attn] = COMPRESSION_RATIO.read(number, f"compress_rates.{name}")
        elif number not in (None, 0, 1):
            raise ValueError(
                f"compress_rates.{name} must be 0, since it compresses nothing, got {show(number)}"
            )
    for attn, name in ((CSA, "compress_rate_csa"), (HCA, "compress_rate_hca")):
        if (number := data.get(name)) is not None:
            agree(name, number, "compress_rates", compression_ratios.get(attn))
            compression_ratios[attn] = number
    return compression_ratios


def _types_of_ratios(
    numbers: list[int], compression_ratios: dict[AttentionType, int]
) -> tuple[dict[int, AttentionType], dict[AttentionType, int]]:
    """What each number of `compress_ratios` means: 0 SWA, the smaller ratio CSA, the larger HCA."""
    ratios = {CSA: 4, HCA: 128} | compression_ratios
    distinct = sorted(set(numbers) - {0})
    by_ratio = {0: SWA} | {number: attn for attn, number in ratios.items()}
    is_ambiguous = ratios[CSA] == ratios[HCA] and ratios[CSA] in distinct
    if all(ratio in by_ratio for ratio in distinct) and not is_ambiguous:
        return by_ratio, compression_ratios
    if len(distinct) == 2 and not compression_ratios:
        return dict(zip((0, *distinct), (SWA, CSA, HCA), strict=True)), dict(
            zip((CSA, HCA), distinct, strict=True)
        )
    raise ValueError(
        f"compress_ratios holds {show(distinct)}, which do not tell CSA from HCA; "
        f"add compress_rates with the compression ratio of each layer type (known: {ratios})"
    )


def _router_types(data: dict[str, Any], num_layers: int) -> tuple[RouterType, ...]:
    names, num_hash = data.get("mlp_layer_types"), data.get("num_hash_layers")
    counted = None
    if num_hash is not None:
        num_hash = min(num_hash, num_layers)
        counted = (RouterType.HASH,) * num_hash + (RouterType.LEARNED,) * (num_layers - num_hash)
    if names is None:
        if counted is None:
            raise ValueError("mlp_layer_types (or num_hash_layers) is missing")
        return counted
    listed = tuple(ROUTER_TYPE_NAMES[name] for name in _trunk("mlp_layer_types", names, num_layers))
    agree("mlp_layer_types", listed, "num_hash_layers", counted)
    return listed
