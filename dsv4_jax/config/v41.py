"""DeepSeek-V4.1 in a `config.json`: its names of fields, and what they say beyond DeepSeek-V4's.

Source: deepseek_v41.md section 2.
"""

from __future__ import annotations

from typing import Any

from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.config.engram import ENGRAM_KINDS, ENGRAM_LAYERS, EngramConfig
from dsv4_jax.config.kinds import Kind, ListOf, Whole, require, show
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.limits import MAX_LAYERS
from dsv4_jax.config.sources import COUNT, LAYERS, RATIOS, Candidates, EntrySources

WEIGHT_BLOCK = 32
"""Outputs and inputs that share a scale of an FP8 weight."""

FIXED_V41 = {"gate_temp": 1.0}
"""The one value of fields that DeepSeek-V4 does not have; absent is as good."""

_ENGRAM_FIELDS = {
    "engram_max_ngram_size": "max_ngram",
    "engram_n_heads": "num_heads",
    "engram_head_dim": "head_dim",
    "engram_vocab_size": "least_prime",
    "engram_compressed_vocab_size": "num_normalized_ids",
    "engram_pad_token_id": "pad_token_id",
}
_NAMES_IN_FILE = {
    "sources.ratios": "compress_ratios",
    "sources.makers": "kv_source_layer_ids",
    "sources.selectors": "index_source_layer_ids",
    "candidates.layer": "candidate_source_layer_id",
    "candidates.blocks * block_size - (block_size - 1)": (
        "candidate_topk_blocks * candidate_block_size - (candidate_block_size - 1)"
    ),
    "indexer_top_k": "index_topk",
}
"""What errors of `EntrySources` name, by the fields of a file that hold it."""
V41_FIELDS: dict[str, Kind] = {
    "kv_source_layer_ids": LAYERS,
    "index_source_layer_ids": LAYERS,
    "candidate_source_layer_id": Whole(-1, MAX_LAYERS),
    "candidate_topk_blocks": Whole(0, COUNT.most),
    "candidate_block_size": Whole(0, COUNT.most),
    "engram_layer_ids": ENGRAM_LAYERS,
    "engram_num_embeddings": ListOf(Whole(1, 2**62), ENGRAM_LAYERS.most),
    **{theirs: ENGRAM_KINDS[ours] for theirs, ours in _ENGRAM_FIELDS.items()},
}
"""Kinds of the fields that DeepSeek-V4 does not have."""


def read_v41(contents: dict[str, Any], data: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of a `DSV4Config` that DeepSeek-V4.1 has beyond DeepSeek-V4, and its layers.

    Args:
      contents: of the text part of `config.json`.
      data: the declared fields of it, read.
      num_layers: trunk layers.

    Raises:
      ValueError: a field is missing, out of range or in contradiction to another; it is named.
    """
    require(data, "rms_norm_eps")  # for which V4 has a default, and another
    numbers = contents.get("compress_ratios")
    if numbers is None:
        raise ValueError("compress_ratios is missing, one per layer")
    ratios = RATIOS.read(numbers, "compress_ratios")
    if len(ratios) < num_layers:
        raise ValueError(
            f"compress_ratios must have num_hidden_layers={num_layers} entries at least, got "
            f"{len(ratios)}"
        )
    trunk = tuple(ratios[:num_layers])
    try:
        sources = EntrySources(
            ratios=trunk,
            makers=_trunk_layers(data, "kv_source_layer_ids", num_layers),
            selectors=_trunk_layers(data, "index_source_layer_ids", num_layers),
            candidates=_candidates(data, num_layers),
        )
        sources.check_fits(num_layers=num_layers, indexer_top_k=require(data, "index_topk"))
    except ValueError as error:
        text = str(error)
        for ours, theirs in _NAMES_IN_FILE.items():
            text = text.replace(ours, theirs)
        raise ValueError(text) from error
    return {
        "layer_types": tuple(AttentionType.CSA if r else AttentionType.SWA for r in trunk),
        "router_types": (RouterType.LEARNED,) * num_layers,
        "sources": sources,
        "engram": _engram(data, num_layers),
        "query_norm": False,
        "shifted_streams": True,
        "weight_block": WEIGHT_BLOCK,
    }


def _trunk_layers(data: dict[str, Any], name: str, num_layers: int) -> tuple[int, ...]:
    """Of a list of layers those that there are, as of a model cut by `num_hidden_layers` alone."""
    return tuple(layer for layer in require(data, name) if layer < num_layers)


def _candidates(data: dict[str, Any], num_layers: int) -> Candidates | None:
    layer = require(data, "candidate_source_layer_id")
    if layer < 0 or layer >= num_layers:
        return None
    sizes = {}
    for ours, theirs in (("blocks", "candidate_topk_blocks"), ("block_size", _BLOCK_SIZE)):
        sizes[ours] = require(data, theirs)
        if not sizes[ours]:
            raise ValueError(
                f"{theirs} must be at least 1 beside candidate_source_layer_id={layer}, got 0"
            )
    return Candidates(layer=layer, **sizes)


_BLOCK_SIZE = "candidate_block_size"


def _engram(data: dict[str, Any], num_layers: int) -> EngramConfig | None:
    listed = tuple(data.get("engram_layer_ids", ()))
    if not listed:
        return None
    fields = {ours: require(data, theirs) for theirs, ours in _ENGRAM_FIELDS.items()}
    whole = EngramConfig(layers=listed, **fields)
    given = require(data, "engram_num_embeddings")
    if tuple(given) != whole.table_rows:
        raise ValueError(
            "engram_num_embeddings must be the sums of each layer's primes, "
            f"{show(list(whole.table_rows))}, got {show(given)}"
        )
    # A cut model keeps the tables of the layers that it keeps, whose primes are the first.
    kept = tuple(layer for layer in listed if layer < num_layers)
    return EngramConfig(layers=kept, **fields) if kept else None


def write_v41(sources: EntrySources, engram: EngramConfig | None) -> dict[str, Any]:
    """The fields of a `config.json` from which `read_v41` gets these back."""
    candidates = sources.candidates
    fields: dict[str, Any] = {
        **FIXED_V41,
        "kv_source_layer_ids": list(sources.makers),
        "index_source_layer_ids": list(sources.selectors),
        "candidate_source_layer_id": -1 if candidates is None else candidates.layer,
        "candidate_topk_blocks": 0 if candidates is None else candidates.blocks,
        "candidate_block_size": 0 if candidates is None else candidates.block_size,
        "engram_layer_ids": [],
    }
    if engram is not None:
        fields |= {theirs: getattr(engram, ours) for theirs, ours in _ENGRAM_FIELDS.items()}
        fields |= {
            "engram_layer_ids": list(engram.layers),
            "engram_num_embeddings": list(engram.table_rows),
        }
    return fields


def v41_flash_fields() -> dict[str, Any]:
    """What `DSV4Config.v41_flash` has otherwise than `DSV4Config.flash`."""
    ratios = (0, 0) + (2,) * 18 + (1,) * 20
    return {
        "hidden_size": 5120,
        "layer_types": tuple(AttentionType.CSA if r else AttentionType.SWA for r in ratios),
        "router_types": (RouterType.LEARNED,) * 40,
        "q_lora_rank": 1280,
        "indexer_num_heads": 32,
        "num_routed_experts": 384,
        "moe_intermediate_size": 2304,
        "rms_norm_eps": 1e-20,
        "num_mtp_layers": 0,
        "sources": EntrySources(
            ratios=ratios,
            makers=(2, 8, 14, 20),
            selectors=(2, 8, 14, 20, 24, 28, 32, 36),
            candidates=Candidates(layer=20, blocks=2048, block_size=8),
        ),
        "engram": EngramConfig(
            layers=(1, 14),
            max_ngram=4,
            num_heads=8,
            head_dim=256,
            least_prime=16_000_000,
            num_normalized_ids=99_092,
            pad_token_id=2,
        ),
        "query_norm": False,
        "shifted_streams": True,
        "weight_block": WEIGHT_BLOCK,
        "dspark": DSparkConfig(
            block_size=5,
            markov_rank=256,
            noise_token_id=128_799,
            target_layers=(37, 38, 39),
            num_stages=3,
            num_experts=128,
            num_experts_per_token=3,
        ),
    }
