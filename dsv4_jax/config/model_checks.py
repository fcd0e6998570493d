"""Sizes of a model that must fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4_jax.config.kinds import show
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.config.limits import MAX_BLOCK_TOKENS, MAX_EXPERTS_OF_ALL_LAYERS

if TYPE_CHECKING:
    from dsv4_jax.config.model_config import DSV4Config

SWA, CSA = AttentionType.SWA, AttentionType.CSA


def check_sizes(config: DSV4Config) -> None:
    """Refuses sizes that contradict each other, each of which is in its range.

    Raises:
      ValueError: two do; the message names them.
    """
    _check_shared(config)
    if len(config.router_types) != len(config.layer_types):
        raise ValueError(
            f"router_types must have one entry per layer, got {len(config.router_types)} for "
            f"{len(config.layer_types)} layer_types"
        )
    if not config.layer_types:
        raise ValueError("layer_types must name at least one layer, got none")
    for small, large in (("rope_dim", "head_dim"), ("rope_dim", "indexer_head_dim")):
        if getattr(config, small) > getattr(config, large):
            raise ValueError(
                f"{small} must be at most {large}, got {getattr(config, small)} and "
                f"{getattr(config, large)}"
            )
    if config.rope_dim % 2:
        raise ValueError(f"rope_dim must be even, since dims rotate in pairs: {config.rope_dim}")
    if config.rope_dim == config.head_dim:
        raise ValueError(f"rope_dim must leave dims unrotated, got head_dim={config.head_dim}")
    if config.num_attention_heads % config.o_groups:
        raise ValueError(
            f"o_groups must divide num_attention_heads, got {config.o_groups} and "
            f"{config.num_attention_heads}"
        )
    if config.num_experts_per_token > config.num_routed_experts:
        raise ValueError(
            f"num_experts_per_token must be at most num_routed_experts, got "
            f"{config.num_experts_per_token} and {config.num_routed_experts}"
        )
    if config.rope_scaling is not None and config.compress_rope_theta <= 1:
        raise ValueError(
            "compress_rope_theta must be above 1 beside rope_scaling, which takes its "
            f"logarithm, got {config.compress_rope_theta}"
        )
    if config.num_routed_experts * len(config.layer_types) > MAX_EXPERTS_OF_ALL_LAYERS:
        raise ValueError(
            f"num_routed_experts={config.num_routed_experts} in {len(config.layer_types)} "
            f"layer_types must be at most {MAX_EXPERTS_OF_ALL_LAYERS:,} experts together"
        )
    if config.block_tokens > MAX_BLOCK_TOKENS:
        raise ValueError(
            "csa_compression_ratio and hca_compression_ratio must have a common multiple "
            f"with 128 of at most {MAX_BLOCK_TOKENS:,}, got {config.csa_compression_ratio} and "
            f"{config.hca_compression_ratio}, whose is {config.block_tokens:,}"
        )
    for layer in config.index_reuse:
        selecting = [
            other
            for other, attn in enumerate(config.layer_types[: max(layer, 0)])
            if attn == CSA and other not in config.index_reuse
        ]
        if not 0 <= layer < len(config.layer_types) or config.layer_types[layer] != CSA:
            raise ValueError(f"index_reuse must name CSA layers, got layer {layer}")
        if not selecting:
            raise ValueError(
                f"index_reuse must leave a CSA layer before layer {layer} that selects for it"
            )


def _check_shared(config: DSV4Config) -> None:
    """Refuses sources and tables that do not fit, or what cannot be beside them."""
    if config.weight_block not in (32, 128):
        raise ValueError(f"weight_block must be 128, or 32 of V4.1, got {config.weight_block}")
    if config.engram is not None:
        config.engram.check_fits(num_layers=config.num_layers, vocab_size=config.vocab_size)
    if config.sources is None:
        return
    config.sources.check_fits(num_layers=config.num_layers, indexer_top_k=config.indexer_top_k)
    wanted = tuple(CSA if ratio else SWA for ratio in config.sources.ratios)
    if config.layer_types != wanted:
        raise ValueError(
            "layer_types must be CSA where sources.ratios has a ratio and SWA elsewhere, got "
            f"{show([str(attn) for attn in config.layer_types])}"
        )
    if config.idea.pooling is not None:
        raise ValueError(
            "idea.pooling must be None beside sources, whose entries are pairs or single tokens of "
            "their own and pass no compressor"
        )
    if config.index_reuse:
        raise ValueError(
            f"index_reuse must be empty beside sources, got {config.index_reuse}; "
            "sources.selectors says which layers select"
        )
