"""Operations that the prefill of a prompt needs."""

from __future__ import annotations

import numpy as np

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.config.upper_layers import upper_layers


def prefill_flops(config: DSV4Config, num_tokens: int, upper_tokens: int | None = None) -> float:
    """Operations needed to prefill a prompt from the start: deepseek_v4.md section 7.4.

    Counts only the experts that a token picks, and the head of the last token only.

    Args:
      config: the model.
      num_tokens: of the prompt.
      upper_tokens: the last so many of them, which `upper_layers` run; None is all.
    """
    positions = np.arange(1, num_tokens + 1, dtype=np.float64)
    upper, total = upper_layers(config), 2.0 * config.vocab_size * config.hidden_size
    for spec in layer_schedule(config):
        own, made = positions, num_tokens
        if upper is not None and upper_tokens is not None and spec.layer_idx >= upper.first:
            own = positions[num_tokens - upper_tokens :]
            made = num_tokens if spec.layer_idx == upper.first else len(own)
        total += len(own) * _per_token(config)
        attends = _own_entries if not spec.shares else _shared_entries
        total += attends(config, spec, own, made)
    return total


def _per_token(config: DSV4Config) -> float:
    """Of a token in a layer: projections, experts and hyper-connections."""
    d, c, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    ql, latent = config.q_lora_rank, config.o_groups * config.o_lora_rank
    projections = 2 * (
        d * ql + ql * heads * c + d * c + heads * c * config.o_lora_rank + latent * d
    )
    experts = config.num_experts_per_token + 1
    moe = experts * 6 * d * config.moe_intermediate_size + 2 * d * config.num_routed_experts
    return projections + moe + 2 * 2 * (2 + config.hc_mult) * config.hc_mult * config.hc_mult * d


def _own_entries(config: DSV4Config, spec: LayerSpec, positions: np.ndarray, _: int) -> float:
    """Making entries, scoring and attention of a layer that makes entries of its own."""
    d, c, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    ql, index_heads, index_dim = (
        config.q_lora_rank, config.indexer_num_heads, config.indexer_head_dim,
    )  # fmt: skip
    entries = positions // config.compression_ratio(spec.attn)
    total, selected = 0.0, np.zeros_like(entries)
    if spec.attn == AttentionType.CSA:
        selected = np.minimum(entries, config.indexer_top_k)
        total += len(positions) * (
            2 * d * 4 * c + 2 * (ql * index_heads * index_dim + d * index_heads + d * 4 * index_dim)
        )
        total += float(np.sum(entries)) * (2 * index_heads * index_dim + 3 * index_heads)
    elif spec.attn == AttentionType.HCA:
        selected = entries
        total += len(positions) * 2 * d * 2 * c
    window = np.minimum(positions, config.sliding_window)
    return total + 4 * heads * c * float(np.sum(window + selected))


def _shared_entries(
    config: DSV4Config, spec: LayerSpec, positions: np.ndarray, num_made: int
) -> float:
    """The same of a layer that may read what another made; of `num_made` tokens it makes entries.

    Rows of an Engram table are counted too, which become keys of all streams and a value.
    """
    d, c, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    index_heads, index_dim = config.indexer_num_heads, config.indexer_head_dim
    total, selected = 0.0, np.zeros_like(positions)
    if spec.writes_engram and config.engram is not None:
        total += len(positions) * 2 * config.engram.width * (config.hc_mult + 1) * d
    if spec.ratio:
        entries = positions // spec.ratio
        selected = np.minimum(entries, config.indexer_top_k)
        if spec.makes_entries:
            planes = 1 if spec.ratio == 1 else 2  # values, and scores of a pair
            total += num_made * (2 * d * planes * c + 2 * c * index_dim / spec.ratio)
        if spec.makes_selection:
            total += len(positions) * 2 * (config.q_lora_rank * index_dim + d) * index_heads
            limit = config.sources.candidates if config.sources is not None else None
            if spec.takes_candidates and limit is not None:
                entries = np.minimum(entries, limit.blocks * limit.block_size)
            total += float(np.sum(entries)) * (2 * index_heads * index_dim + 3 * index_heads)
    window = np.minimum(positions, config.sliding_window)
    return total + 4 * heads * c * float(np.sum(window + selected))
