"""Writes `config.json` as transformers writes it, and what readers of the releases want beside.

The releases count hash layers and give a ratio a layer, where transformers names every layer's
types. Engines read the one or the other.
"""

from __future__ import annotations

import math
from typing import Any

from dsv4_jax.config.draft import EXPERT_FIELDS
from dsv4_jax.config.families import V41
from dsv4_jax.config.layer_types import RouterType
from dsv4_jax.config.model_config import DSV4Config
from dsv4_jax.config.read_json import (
    CSA,
    FIXED,
    HCA,
    LAYER_TYPE_NAMES,
    OPTIONAL,
    ROUTER_TYPE_NAMES,
    SAME_NAME,
    SWA,
)
from dsv4_jax.config.sources import EntrySources
from dsv4_jax.config.v41 import write_v41


def write_config(config: DSV4Config) -> dict[str, Any]:
    """The `config.json` of `config`."""
    types = {attn: name for name, attn in LAYER_TYPE_NAMES.items()}
    routers = {router: name for name, router in ROUTER_TYPE_NAMES.items()}
    partial = _partial_factor(config.rope_dim, config.head_dim)
    main = {"rope_type": "default", "rope_theta": config.rope_theta}
    compress: dict[str, Any] = {"rope_type": "default", "rope_theta": config.compress_rope_theta}
    if (scaling := config.rope_scaling) is not None:
        compress |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": 1.0,
        }
    fields = {theirs: getattr(config, ours) for theirs, ours in (SAME_NAME | OPTIONAL).items()}
    eos = config.eos_token_ids
    if config.sources is not None:
        layers = _shared_layers(config, config.sources)
    else:
        layers = {
            "layer_types": [types[attn] for attn in config.layer_types],
            "mlp_layer_types": [routers[router] for router in config.router_types],
            "compress_rates": {
                types[CSA]: config.csa_compression_ratio,
                types[HCA]: config.hca_compression_ratio,
            },
            **_as_released(config),
        }
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        **FIXED,
        **fields,
        "num_hidden_layers": config.num_layers,
        **_draft(config),
        **layers,
        "qk_rope_head_dim": config.rope_dim,
        "partial_rotary_factor": partial,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "rope_parameters": {
            "main": main | {"partial_rotary_factor": partial},
            "compress": compress | {"partial_rotary_factor": partial},
        },
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }


def _as_released(config: DSV4Config) -> dict[str, Any]:
    """Layers and rotation as the release has them, where its form can say it.

    Ratios of drafts follow those of the trunk, as zeros.
    """
    fields: dict[str, Any] = {}
    if (scaling := config.rope_scaling) is not None:
        fields["rope_scaling"] = {
            "type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
    num_hash = config.router_types.count(RouterType.HASH)
    if all(router == RouterType.HASH for router in config.router_types[:num_hash]):
        fields["num_hash_layers"] = num_hash
    stages = config.num_mtp_layers if config.dspark is None else config.dspark.num_stages
    if stages is not None and config.csa_compression_ratio != config.hca_compression_ratio:
        ratios = (
            0 if attn == SWA else config.compression_ratio(attn) for attn in config.layer_types
        )
        fields["compress_ratios"] = [*ratios, *[0] * stages]
    return fields


def _shared_layers(config: DSV4Config, sources: EntrySources) -> dict[str, Any]:
    """The layers of DeepSeek-V4.1; those of the draft are among their ratios."""
    stages = 0 if config.dspark is None else config.dspark.known_stages
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": V41,
        "compress_ratios": [*sources.ratios, *[0] * stages],
        "num_nextn_predict_layers": stages,
        **write_v41(sources, config.engram),
    }


def _partial_factor(rope_dim: int, head_dim: int) -> float:
    """The factor from which readers get `rope_dim` back: they truncate, and 44 * (30 / 44) < 30."""
    partial = rope_dim / head_dim
    return partial if int(head_dim * partial) == rope_dim else math.nextafter(partial, 1.0)


def _draft(config: DSV4Config) -> dict[str, Any]:
    """The draft as the release announces it: `num_nextn_predict_layers` is 1 for either kind.

    How many stages there are is told by a ratio of 0 for each, after those of the trunk, and by
    `n_mtp_layers`, which vLLM reads.
    """
    if (dspark := config.dspark) is None:
        return {"num_nextn_predict_layers": config.num_mtp_layers}
    stages = {} if dspark.num_stages is None else {"n_mtp_layers": dspark.num_stages}
    experts = {
        theirs: value
        for theirs, ours in EXPERT_FIELDS.items()
        if (value := getattr(dspark, ours)) is not None
    }
    return {
        **experts,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": dspark.block_size,
        "dspark_markov_rank": dspark.markov_rank,
        "dspark_noise_token_id": dspark.noise_token_id,
        "dspark_target_layer_ids": list(dspark.target_layers),
        **stages,
    }
