"""What a call takes on a device beside weights and cache: an estimate from sizes alone."""

from __future__ import annotations

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.moe import GATHERED_ROWS
from pallas_kernels.expert_mlp import UNPACKED_ROWS

_BF16, _F32 = 2, 4


def workspace_bytes(
    config: DSV4Config,
    *,
    data: int,
    model: int,
    context: int,
    step_tokens: int,
    logit_rows: int,
    split_cache: bool = False,
) -> int:
    """An estimate of what a call takes on a device beside weights and cache.

    The streams, and the larger of a layer's two halves, as their kernels have them:

    - attention: queries, what attention makes of them, and a CSA layer's scores of all entries, of
      a device's own rows. Where the cache is split, scores of all rows and a device's own entries,
      and of all heads the queries and five times their sums in f32: of two splits, joined, packed
      and as other devices send them;
    - experts: a row in E4M3 and a hidden one in BF16 for each expert that a token picked, and gate
      and up of a device's experts in FP8 where each gets many rows.

    Beside them three rows of the hidden size, and three times the logits for sampling. Rows of
    several data shards come to experts some at a time, twice that many where there are more. How
    far this is from what XLA takes is in docs/design/several_gpus.md.

    Args:
      config: the model.
      data: data shards.
      model: devices of a data shard.
      context: most tokens of a request.
      step_tokens: tokens of the call on a data shard.
      logit_rows: tokens of them whose logits are computed.
      split_cache: blocks are dealt over `model`.
    """
    rows = step_tokens * (config.hc_mult + 3) * config.hidden_size * _BF16
    halves = (
        _attention_bytes(config, model, context, step_tokens, split_cache=split_cache),
        _expert_bytes(config, data, model, step_tokens),
    )
    return rows + max(halves) + 3 * logit_rows * config.vocab_size * _F32


def _attention_bytes(
    config: DSV4Config, model: int, context: int, tokens: int, *, split_cache: bool
) -> int:
    heads = 2 * tokens * config.num_attention_heads // model * config.head_dim * _BF16
    if split_cache and model > 1:
        heads += tokens * config.num_attention_heads * config.head_dim * (_BF16 + 5 * _F32)
    if AttentionType.CSA not in config.layer_types:
        return heads
    ratio = config.csa_compression_ratio
    if config.sources is not None:
        ratio = min(filter(None, config.sources.ratios))
    scores = tokens * (context // ratio) * _F32
    return heads + scores // model


def _expert_bytes(config: DSV4Config, data: int, model: int, tokens: int) -> int:
    dim, width = config.hidden_size, config.moe_intermediate_size
    rows = tokens if data == 1 else min(data * tokens, GATHERED_ROWS)
    at_once = 2 if data > 1 and data * tokens > GATHERED_ROWS else 1
    pairs = rows * config.num_experts_per_token
    gathered = rows * dim * _BF16 if data > 1 else 0
    unpacked = 0
    if pairs >= UNPACKED_ROWS * config.num_routed_experts:
        unpacked = 2 * config.num_routed_experts // (data * model) * dim * width
    return at_once * pairs * (dim + _BF16 * width) + gathered + unpacked
