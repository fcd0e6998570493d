"""A DSpark draft: what settled tokens leave, a pass over a block, and the chain of its tokens.

`dspark_sequence.py` has the same over whole sequences.

A token is settled when the trunk has run it and it is kept. The anchor is the token that the trunk
has drawn and not yet run; the block stands at its position and those after it, and row i guesses
the token at the position after row i.

Source: dspark.md sections 3 and 4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.block_attention import block_attention
from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import Output
from dsv4_jax.attention.swa import window_tokens
from dsv4_jax.cache.draft_blocks import Blocks
from dsv4_jax.cache.new_tokens import NewTokens
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.collectives import join_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.linear import linear
from dsv4_jax.model.block import block
from dsv4_jax.model.draft_params import DSparkParams
from dsv4_jax.model.hyper_connections import collapse_streams
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import embed, start_residual
from dsv4_jax.peers import using
from pallas_kernels.common.norm_rope import rms_norm


class Guesses(NamedTuple):
    """What a pass gives for the N rows of each block.

    Attributes:
      hidden: [B, N, D], streams collapsed, before the norm.
      logits: f32[B, N, V], of the head alone.
    """

    hidden: jax.Array
    logits: jax.Array


class Drafts(NamedTuple):
    """The chain of a block.

    Attributes:
      token_ids: i32[B, N], the guesses, in order.
      logits: f32[B, N, V], that each was drawn from.
      confidence: f32[B, N], logit of the chance that each is kept if those before it are.
    """

    token_ids: jax.Array
    logits: jax.Array
    confidence: jax.Array


def context_tokens(
    params: DSV4Params,
    means: jax.Array,
    positions: jax.Array,
    state: StateCachePool,
    config: DSV4Config,
) -> list[NewTokens]:
    """`context_entries` of a call's tokens, encoded as the rings of the stages keep them.

    Args:
      params: model parameters, with DSpark stages.
      means: [T, K, D], of the trunk (`TrunkOutput`).
      positions: i32[T].
      state: the pool of window layers.
      config: the model.

    Returns:
      What each stage is to commit.
    """
    draft = dspark_stages(params)
    with using(params.peers):
        joined = means.reshape(means.shape[0], -1)
        context = linear(joined, draft.main_proj)
        context = rms_norm(context, draft.main_norm, eps=config.rms_norm_eps)
        layers = [layer.attn for layer in draft.layers]
        return window_tokens(layers, context, positions, state, config)


def run_blocks(
    params: DSV4Params,
    anchor_ids: jax.Array,
    blocks: Blocks,
    state: StateCachePool,
    config: DSV4Config,
) -> Guesses:
    """`guess_block` on the rings: one pass over the blocks of B requests.

    Args:
      params: model parameters, with DSpark stages.
      anchor_ids: i32[B], drawn and not yet run.
      blocks: where they stand.
      state: the pool of window layers, with all settled tokens.
      config: the model, with `dspark`.
    """
    draft, spec = dspark_stages(params), config.dspark
    assert spec is not None
    num_blocks, size = anchor_ids.shape[0], blocks.size
    ids = jnp.full((num_blocks, size), spec.noise_token_id, jnp.int32)
    ids = ids.at[:, 0].set(anchor_ids).reshape(-1)
    residual = start_residual(embed(params, ids, config), shifted=config.shifted_streams)
    specs, config = draft_layers(config), stage_config(config)
    with using(params.peers):
        for layer, layer_spec in zip(draft.layers, specs, strict=True):

            def attention(
                layer: AttentionParams, x: jax.Array, family_idx: int = layer_spec.family_idx
            ) -> tuple[None, Output]:
                return None, block_attention(layer, x, state, family_idx, blocks, config)

            _, residual = block(
                layer, residual, ids, config, attention, segment_ids=blocks.segment_ids
            )
        streams = join_rows(residual.before_head(), ids.shape[0])
    return draft_guesses(params, streams.reshape(num_blocks, size, *streams.shape[1:]), config)


def draft_guesses(params: DSV4Params, streams: jax.Array, config: DSV4Config) -> Guesses:
    """What the last stage's streams [B, N, S, D] give, as `Residual.before_head` has them."""
    draft = dspark_stages(params)
    hidden = streams[..., 0, :]
    if draft.hc_head is not None:
        hidden = collapse_streams(draft.hc_head, streams, config)
    hidden = checkpoint_name(hidden, "hidden")
    normed = checkpoint_name(rms_norm(hidden, draft.norm, eps=config.rms_norm_eps), "normed")
    return Guesses(hidden, linear(normed, params.head, dtype=jnp.float32))


@functools.lru_cache(maxsize=16)
def stage_config(config: DSV4Config) -> DSV4Config:
    """The config as a stage's layers take it, which may have and pick other numbers of experts."""
    spec = config.dspark
    if spec is None or (spec.num_experts is None and spec.num_experts_per_token is None):
        return config
    return dataclasses.replace(
        config,
        num_routed_experts=spec.num_experts or config.num_routed_experts,
        num_experts_per_token=spec.num_experts_per_token or config.num_experts_per_token,
    )


def dspark_stages(params: DSV4Params) -> DSparkParams:
    """The parameters of the DSpark stages.

    Raises:
      ValueError: there is no draft, or one of another kind.
    """
    if not isinstance(params.mtp, DSparkParams):
        held = "None" if params.mtp is None else "an MTP block"
        raise ValueError(f"params.mtp must be DSpark stages, and is {held}")
    return params.mtp


def chain(
    params: DSV4Params,
    anchor_ids: jax.Array,
    guesses: Guesses,
    choose: Callable[[jax.Array, int], jax.Array],
) -> Drafts:
    """Ties the guesses of a block together: each is corrected by the token before it.

    Args:
      params: model parameters, with DSpark stages.
      anchor_ids: i32[B].
      guesses: of `guess_block`.
      choose: draws i32[B] from f32[B, V], the corrected logits of row i.
    """
    draft = dspark_stages(params)
    previous, found = anchor_ids, []
    for row in range(guesses.logits.shape[1]):
        hint = draft.markov_w1[previous]  # [B, r]
        logits = guesses.logits[:, row] + linear(hint, draft.markov_w2, dtype=jnp.float32)
        read = jnp.concatenate([guesses.hidden[:, row], hint], axis=-1).astype(jnp.float32)
        confidence = read @ draft.confidence.astype(jnp.float32)
        previous = choose(logits, row)
        found.append(Drafts(previous, logits, confidence))
    return jax.tree.map(lambda *rows: jnp.stack(rows, axis=1), *found)


def choose_likeliest(logits: jax.Array, row: int) -> jax.Array:
    """Of f32[B, V] the largest; of equals the lower id."""
    del row
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
