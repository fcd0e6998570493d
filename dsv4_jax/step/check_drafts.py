"""Which drafts of a step are checked, and how many of them are what is drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv4_jax.config import DSV4Config
from dsv4_jax.step.draws import DrawnCounts, Logprobs, TokenMasks, draw
from dsv4_jax.step.sampling import Sampling
from dsv4_jax.step.serve_values import ServeInput, ServeOutput
from pallas_kernels.common.call import CallIndices


def cut_drafts(
    call: CallIndices,
    token_ids: jax.Array,
    serve_input: ServeInput,
    last: ServeOutput | None,
    draft_tokens: int,
) -> tuple[CallIndices, jax.Array]:
    """Leaves out drafts that are too unlikely to be kept; they become padding.

    Which drafts are checked changes no answer. Confidences are those of the step before, and are
    looked at only where a row's drafts are those that it guessed.

    Args:
      call: the call's indices.
      token_ids: i32[T].
      serve_input: what to run.
      last: what the step before gave.
      draft_tokens: k, the most drafts of a row.

    Returns:
      The call, and i32[B], a row's last tokens after which one is drawn.
    """
    num_checked, least = serve_input.num_checked, serve_input.least_survival
    if last is None or last.confidence is None or least is None:
        return call, num_checked
    order = jnp.arange(draft_tokens, dtype=jnp.int32)[None]
    first = call.row_offsets + call.row_counts - num_checked + 1
    here = jnp.clip(first[:, None] + order, 0, token_ids.shape[0] - 1)
    is_draft = order < num_checked[:, None] - 1
    is_known = jnp.all(~is_draft | (token_ids[here] == last.draft_token_ids), axis=1)
    survival = jnp.cumprod(jax.nn.sigmoid(last.confidence), axis=1)
    is_worth = is_draft & ((survival >= least[:, None]) | ~is_known[:, None])
    cut = num_checked - 1 - jnp.sum(is_worth, axis=1, dtype=jnp.int32)
    return call.keep(call.row_counts - cut), num_checked - cut


def verify_drafts(
    logits: jax.Array,
    token_ids: jax.Array,
    positions: jax.Array,
    num_checked: jax.Array,
    sampling: Sampling,
    counts: DrawnCounts | None,
    masks: TokenMasks | None,
    config: DSV4Config,
) -> tuple[jax.Array, jax.Array, Logprobs]:
    """Draws after each checked token, and counts the drafts that were drawn.

    Args:
      logits: f32[B, k + 1, V], after each checked token.
      token_ids: i32[B, k + 1], the checked tokens: the last one known, then drafts.
      positions: i32[B, k + 1], of those tokens.
      num_checked: i32[B], how many count.
      sampling: settings of each row.
      counts: what rows have drawn before, the last known token included; None is nothing.
      masks: which tokens rows may draw; None is all.
      config: the model.

    Returns:
      i32[B, k + 1], the drawn tokens; i32[B], how many drafts are kept: the first n of the drawn
      tokens are the first n drafts, and the one after them is drawn too; and log-probabilities.
    """
    drafts = token_ids[:, 1:]
    sampler = config.idea.sampler
    drawn, logprobs = draw(logits, sampling, positions + 1, counts, drafts, sampler, masks)
    order = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    agrees = (drawn[:, :-1] == drafts) & (order < num_checked[:, None] - 1)
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return drawn, accepted, logprobs
