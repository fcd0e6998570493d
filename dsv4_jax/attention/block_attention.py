"""The attention of a DSpark stage: every row of a block sees settled tokens and the whole block.

Source: dspark.md section 4.
"""

from __future__ import annotations

import jax

import pallas_kernels as pk
from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import (
    Output,
    inverse_rope,
    output,
    project_queries,
    project_tokens,
)
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.cache.draft_blocks import Blocks, attend_in_blocks
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType


def block_attention(
    params: AttentionParams,
    x: jax.Array,
    state: StateCachePool,
    family_idx: int,
    blocks: Blocks,
    config: DSV4Config,
) -> Output:
    """One sublayer of a stage; nothing of the block is kept.

    Args:
      params: parameters of the layer.
      x: [B * N, D], normed.
      state: the pool of window layers, which holds the last W settled tokens.
      family_idx: index of the stage into the pool's stacked arrays.
      blocks: where the rows stand.
      config: the model.

    Returns:
      [B * N, D].
    """
    frequencies = rope_frequencies(config, AttentionType.SWA)
    new = project_tokens(params, x, blocks.positions, config)
    projected, _ = project_queries(params, new.latent, config)
    queries, own = pk.encode_tokens(
        projected,
        new.kv,
        pk.NormRope(params.kv_norm, frequencies, config.rms_norm_eps, config.query_norm),
        blocks.positions,
        codec=state.schema.format.ring,
    )
    assert queries is not None
    attended = attend_in_blocks(queries, params.attn_sink, state, family_idx, own, blocks)
    attended = inverse_rope(attended, blocks.positions, frequencies)
    return output(params, attended.astype(x.dtype), config)
