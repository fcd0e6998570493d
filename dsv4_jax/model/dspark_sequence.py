"""A DSpark draft over whole sequences, without a cache: what the cached one is tested against.

Source: dspark.md sections 3 and 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import (
    Output,
    inverse_rope,
    output,
    project_input,
    rotated_queries,
    window_entry,
)
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.linear import linear
from dsv4_jax.model.block import block
from dsv4_jax.model.dspark import Guesses, draft_guesses, dspark_stages, stage_config
from dsv4_jax.model.hyper_connections import Residual
from dsv4_jax.model.layer_params import LayerParams, layer_of
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import embed
from pallas_kernels.common.backend import Backend
from pallas_kernels.common.formats import CacheFormat
from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.sparse_attention.reference import attend


def context_entries(
    params: DSV4Params,
    means: jax.Array,
    positions: jax.Array,
    config: DSV4Config,
    fmt: CacheFormat,
) -> jax.Array:
    """What each stage keeps of settled tokens: the entry of its window ring.

    A stage is never run for settled tokens. All of them read one vector of a token, which the
    trunk's target layers make, so that an entry depends on that token's residual streams alone.

    Args:
      params: model parameters, with DSpark stages.
      means: [..., K, D], the mean over the streams after each target layer, or before it
        (`forward_means`).
      positions: i32[...].
      config: the model.
      fmt: rounds what a cache of that format would round.

    Returns:
      f32[stages, ..., C], rotated to the token's position.
    """
    draft = dspark_stages(params)
    joined = means.reshape(*means.shape[:-2], -1)
    projected = checkpoint_name(linear(joined, draft.main_proj), "main_lin")
    context = rms_norm(projected, draft.main_norm, eps=config.rms_norm_eps)
    context = checkpoint_name(context, "c")
    frequencies = rope_frequencies(config, AttentionType.SWA)
    entries = []
    for stage in range(draft.num_stages):
        layer = layer_of(draft.stages, stage).attn
        kv = checkpoint_name(linear(context, layer.wkv), "kv_lin")
        entry = window_entry(layer, kv, positions, frequencies, config)
        entries.append(fmt.round_window(entry, config.rope_dim))
    return jnp.stack(entries)


def guess_block(
    params: DSV4Params,
    anchor_ids: jax.Array,
    anchor_positions: jax.Array,
    entries: jax.Array,
    *,
    config: DSV4Config,
    fmt: CacheFormat,
) -> Guesses:
    """One pass over the anchor and noise tokens behind it.

    Every row attends to the same keys: the last W settled tokens and all N rows of the block, those
    after it too. Nothing of the block is kept.

    Args:
      params: model parameters, with DSpark stages.
      anchor_ids: i32[B].
      anchor_positions: i32[B]; tokens before it are settled.
      entries: f32[stages, B, T, C] of tokens 0 .. T - 1; those from the anchor on are not read.
      config: the model, with `dspark`.
      fmt: rounds the block's own entries as it rounded those.
    """
    age = anchor_positions[:, None] - jnp.arange(entries.shape[2], dtype=jnp.int32)[None]
    is_context = (age >= 1) & (age <= config.sliding_window)  # [B, T]
    return _guess(
        params, anchor_ids, anchor_positions, entries, is_context, config, fmt, scans=False
    )


def guess_blocks(
    params: DSV4Params,
    anchor_ids: jax.Array,
    anchor_positions: jax.Array,
    entries: jax.Array,
    *,
    config: DSV4Config,
    fmt: CacheFormat,
) -> Guesses:
    """`guess_block` at A anchors of each sequence, which know nothing of each other.

    Only the W entries before an anchor are read for it, however long the sequence is.

    Args:
      params: model parameters, with DSpark stages, stacked.
      anchor_ids: i32[B, A].
      anchor_positions: i32[B, A]; tokens before each are settled for it.
      entries: f32[stages, B, T, C] of tokens 0 .. T - 1.
      config: the model, with `dspark`.
      fmt: rounds the blocks' own entries as it rounded those.

    Returns:
      Guesses of B * A blocks, those of a sequence after one another.
    """
    behind = jnp.arange(config.sliding_window, dtype=jnp.int32)[None, None]
    places = anchor_positions[..., None] - 1 - behind  # [B, A, W]
    rows = jnp.arange(anchor_ids.shape[0])[:, None, None]
    context = entries[:, rows, jnp.maximum(places, 0)]  # [stages, B, A, W, C]
    window = config.sliding_window
    return _guess(
        params,
        anchor_ids.reshape(-1),
        anchor_positions.reshape(-1),
        context.reshape(entries.shape[0], -1, window, entries.shape[-1]),
        (places >= 0).reshape(-1, window),
        config,
        fmt,
        scans=True,
    )


def _guess(
    params: DSV4Params,
    anchor_ids: jax.Array,
    anchor_positions: jax.Array,
    context: jax.Array,
    is_context: jax.Array,
    config: DSV4Config,
    fmt: CacheFormat,
    *,
    scans: bool,
) -> Guesses:
    """One pass over blocks, each of which sees some of f32[stages, B, S, C] by bool[B, S].

    Stages are scanned or unrolled: a scan compiles faster, and does not show what is inside.
    """
    draft, spec = dspark_stages(params), config.dspark
    assert spec is not None
    ids = jnp.full((anchor_ids.shape[0], spec.block_size), spec.noise_token_id, jnp.int32)
    ids = ids.at[:, 0].set(anchor_ids)
    positions = anchor_positions[:, None] + jnp.arange(spec.block_size, dtype=jnp.int32)[None]
    residual = Residual.start(embed(params, ids, config), shifted=config.shifted_streams)
    config = stage_config(config)

    def run_stage(
        residual: Residual, stage: tuple[LayerParams, jax.Array]
    ) -> tuple[Residual, None]:
        layer, seen = stage

        def attention(layer: AttentionParams, x: jax.Array) -> tuple[None, Output]:
            return None, attend_block(layer, x, positions, seen, is_context, config, fmt)

        _, residual = block(layer, residual, ids, config, attention, backend=Backend.REFERENCE)
        return residual, None

    if scans:
        residual, _ = jax.lax.scan(run_stage, residual, (draft.stacked_stages, context))
    else:
        for stage in zip(draft.layers, context, strict=True):
            residual, _ = run_stage(residual, stage)
    return draft_guesses(params, residual.before_head(), config)


def attend_block(
    params: AttentionParams,
    x: jax.Array,
    positions: jax.Array,
    context: jax.Array,
    is_context: jax.Array,
    config: DSV4Config,
    fmt: CacheFormat,
) -> Output:
    """The attention of a stage: [B, N, D], normed -> [B, N, D].

    Args:
      params: parameters of the layer.
      x: the block's rows.
      positions: i32[B, N].
      context: f32[B, T, C], entries of settled tokens.
      is_context: bool[B, T], which of them the block sees.
      config: the model.
      fmt: rounds the block's own entries.
    """
    frequencies = rope_frequencies(config, AttentionType.SWA)
    latent, kv = project_input(params, x, config)
    queries = rotated_queries(params, latent, positions, frequencies, config)
    own = fmt.round_window(
        window_entry(params, kv, positions, frequencies, config), config.rope_dim
    )
    keys = jnp.concatenate([context, own], axis=1)[:, None]  # [B, 1, T + N, C]
    valid = jnp.concatenate([is_context, jnp.ones(own.shape[:2], bool)], axis=1)[:, None]
    attended = attend(queries, keys, valid, params.attn_sink, scale=config.head_dim**-0.5)
    return output(params, inverse_rope(attended.astype(x.dtype), positions, frequencies), config)
