"""The draft (MTP) block in a step: over the kept tokens, then token by token beyond them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dsv4_jax.cache.commit import commit_tokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, put_layer
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.cache.step_input import StepInput, index_call
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.mtp import draft_logits, run_draft
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.draws import DrawnCounts, guess
from dsv4_jax.step.sampling import Sampling
from pallas_kernels.common.addressing import drop_absent
from pallas_kernels.common.call import CallIndices


def draft_ahead(
    params: DSV4Params,
    cache: ModelCache,
    new_tokens: Mapping[str, Family],
    kept: CallIndices,
    next_token_ids: jax.Array,
    streams: jax.Array,
    sampling: Sampling,
    counts: DrawnCounts | None,
    *,
    config: DSV4Config,
    draft_tokens: int,
) -> tuple[Mapping[str, Family], jax.Array]:
    """Guesses the tokens that follow each row's last kept one.

    What the draft block appends of kept tokens joins what the trunk staged. What it appends beyond
    them goes to a copy of its ring that ends with the step. It draws with the noise of the position
    it guesses at, the same that the token will be drawn with.

    Args:
      params: model parameters, with a draft block.
      cache: the cache before the step's tokens are committed.
      new_tokens: staged tokens, by attention type.
      kept: the call, cut to the tokens that are kept.
      next_token_ids: i32[T], the token after each of the call's tokens.
      streams: [T, S, D], the trunk's residual streams.
      sampling: settings of each row.
      counts: what rows had drawn before the step; what they draw in it changes no guess.
      config: the model.
      draft_tokens: k, 1 or more; static.

    Returns:
      The staged tokens, and i32[B, k], the guesses.

    Source: deepseek_v4.md section 1.6.
    """
    swa, family_idx = AttentionType.SWA, draft_layers(config)[0].family_idx
    handle, new, after = run_draft(
        params, streams, next_token_ids, cache.layer(swa, family_idx, kept), config
    )
    assert new is not None
    family = put_layer(new_tokens[swa.value], family_idx, new)
    last = jnp.maximum(kept.row_offsets + kept.row_counts - 1, 0)
    first_layer = jnp.asarray(0, jnp.int32)
    own = jax.tree.map(lambda plane: plane[family_idx][None], cache.state[swa.value])
    ring = commit_tokens(own, new, handle.call, layer=first_layer)
    lengths = kept.row_lengths + kept.row_counts
    sampler, logits = config.idea.sampler, draft_logits(params, after[last], config)
    first = guess(logits, sampling, lengths + 1, counts, sampler)

    def guess_next(
        carry: tuple[StateCachePool, jax.Array, jax.Array], ahead: jax.Array
    ) -> tuple[tuple[StateCachePool, jax.Array, jax.Array], jax.Array]:
        ring, streams, token = carry
        call = _call_ahead(kept, lengths + ahead, cache)
        handle = LayerCacheHandle(
            paged=None, state=ring, layer=first_layer, call=call, schema=ring.schema
        )
        handle, new, streams = run_draft(params, streams, token, handle, config)
        assert new is not None
        ring = commit_tokens(handle.state, new, call, layer=first_layer)
        logits = draft_logits(params, streams, config)
        guessed = guess(logits, sampling, lengths + ahead + 2, counts, sampler)
        return (ring, streams, guessed), guessed

    ahead = jnp.arange(draft_tokens - 1, dtype=jnp.int32)
    _, more = jax.lax.scan(guess_next, (ring, after[last], first), ahead)
    drafts = jnp.concatenate([first[:, None], more.T], axis=1)
    return {**new_tokens, swa.value: family}, drafts


def _call_ahead(kept: CallIndices, lengths: jax.Array, cache: ModelCache) -> CallIndices:
    """One token per row, at positions i32[B] beyond what the cache holds."""
    num_rows = kept.row_slots.shape[0]
    slot_lengths = jnp.zeros(cache.max_requests, jnp.int32)
    slots = drop_absent(kept.row_slots, cache.max_requests)
    step_input = StepInput(
        token_ids=jnp.zeros(num_rows, jnp.int32),
        request_ids=jnp.arange(num_rows, dtype=jnp.int32),
        request_slots=kept.row_slots,
    )
    return index_call(
        slot_lengths.at[slots].set(lengths, mode="drop"),
        cache.block_table,
        step_input,
        block_tokens=cache.block_tokens,
        max_row_tokens=1,
    )
