"""Losses of DSpark stages, which learn what the trunk would draw; the trunk learns nothing."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.config import DSV4Config
from dsv4_jax.model.draft_params import DSparkParams
from dsv4_jax.model.dspark import chain
from dsv4_jax.model.dspark_sequence import context_entries, guess_blocks
from dsv4_jax.model.forward import forward_means
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import head
from pallas_kernels.common.formats import get_cache_format

DEPTH_FACTOR = 0.8
"""Weight of a guess relative to the one before it."""

UNREACHED_WEIGHT = 0.3
"""Weight of guesses whose block would have been cut before them.

A guess counts if all before it were kept. The text goes on otherwise than the trunk would at such
places, and guesses there are of continuations that no greedy answer has; sampled ones have them.
"""

CONFIDENCE_WEIGHT = 0.1
"""Weight of the loss of confidences beside that of guesses."""


class StageLosses(NamedTuple):
    """Of a step, means over its blocks.

    Attributes:
      divergence: f32[], weighted KL from the trunk's distribution to the guess's, in nats.
      confidence: f32[], weighted logistic loss of confidences, in nats.
      agreement: f32[N], by depth, the share of guesses that are the trunk's own likeliest token,
        of those that are reached.
    """

    divergence: jax.Array
    confidence: jax.Array
    agreement: jax.Array


def stage_loss(
    stages: DSparkParams,
    trunk: DSV4Params,
    token_ids: jax.Array,
    anchors: jax.Array,
    *,
    config: DSV4Config,
) -> tuple[jax.Array, StageLosses]:
    """What to lower, and its parts.

    Every guess is corrected by the text's own token before it, as if that had been guessed.

    Args:
      stages: what learns.
      trunk: the model, whose own draft is not read.
      token_ids: i32[B, T].
      anchors: i32[B, A], positions in 1 .. T - 1 - N.
      config: the model, with `dspark`.
    """
    spec = config.dspark
    assert spec is not None
    streams, means = jax.lax.stop_gradient(
        forward_means(
            dataclasses.replace(trunk, mtp=None), token_ids, spec.target_layers, config=config
        )
    )
    trunk_logits = head(trunk.hc_head, trunk.norm, trunk.head, streams, config)
    params = dataclasses.replace(trunk, mtp=stages)
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1])[None], token_ids.shape)
    fmt = get_cache_format("f32")
    entries = context_entries(params, means, positions, config, fmt)
    places = anchors[..., None] + jnp.arange(spec.block_size + 1)[None, None]  # [B, A, N + 1]
    rows = jnp.arange(len(token_ids))[:, None, None]
    text = token_ids[rows, places].reshape(-1, spec.block_size + 1)
    targets = trunk_logits[rows, places[..., :-1]].reshape(len(text), spec.block_size, -1)
    guesses = guess_blocks(
        params, token_ids[rows[..., 0], anchors], anchors, entries, config=config, fmt=fmt
    )
    drafts = chain(params, text[:, 0], guesses, lambda logits, row: text[:, row + 1])
    losses = compare(drafts.logits, drafts.confidence, targets, text[:, 1:])
    return losses.divergence + CONFIDENCE_WEIGHT * losses.confidence, losses


def compare(
    logits: jax.Array, confidence: jax.Array, targets: jax.Array, text: jax.Array
) -> StageLosses:
    """Losses of guesses, from what is known of each block.

    Args:
      logits: f32[B, N, V] of the guesses.
      confidence: f32[B, N], logits too.
      targets: f32[B, N, V], the trunk's logits at the same positions.
      text: i32[B, N], the tokens that the text has there.
    """
    likeliest = jnp.argmax(targets, axis=-1)
    follows = jnp.cumprod((likeliest == text).astype(jnp.float32), axis=1)
    reached = jnp.concatenate([jnp.ones_like(follows[:, :1]), follows[:, :-1]], axis=1)
    depth = jnp.arange(logits.shape[1], dtype=jnp.float32)[None]
    weight = DEPTH_FACTOR**depth * (UNREACHED_WEIGHT + (1 - UNREACHED_WEIGHT) * reached)
    weight = weight / jnp.sum(weight)
    wanted = jax.nn.log_softmax(targets, axis=-1)
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - jax.nn.log_softmax(logits, axis=-1)), axis=-1)
    agrees = (jnp.argmax(logits, axis=-1) == likeliest).astype(jnp.float32)
    doubt = jax.nn.softplus(confidence) - agrees * confidence
    return StageLosses(
        divergence=jnp.sum(weight * divergence),
        confidence=jnp.sum(weight * doubt),
        agreement=jnp.sum(agrees * reached, axis=0) / jnp.maximum(jnp.sum(reached, axis=0), 1),
    )
