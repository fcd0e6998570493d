"""Drafts in a step: what settled tokens leave in their rings, and the guesses after the commit.

Both kinds go the same way. What a draft reads of a token, [n, D], gives the entries of its rings,
which are committed with those of the trunk; then the draft runs behind each row's last kept token,
and nothing of that is kept. DSpark stages guess a block in one pass, an MTP block token by token.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dsv4_jax.cache.draft_blocks import Blocks, next_call
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, put_layer
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model import dspark, mtp
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import TrunkOutput
from dsv4_jax.step.draws import DrawnCounts, guess
from dsv4_jax.step.sampling import Sampling
from pallas_kernels.common.call import CallIndices

_SWA = AttentionType.SWA.value


def target_layers(config: DSV4Config) -> tuple[int, ...]:
    """The layers of the trunk after or before which the draft reads the streams."""
    return () if config.dspark is None else config.dspark.target_layers


def read_tokens(
    params: DSV4Params,
    ran: TrunkOutput,
    next_token_ids: jax.Array,
    call: CallIndices,
    config: DSV4Config,
) -> jax.Array:
    """What the draft reads of a call's tokens.

    Args:
      params: model parameters, with a draft.
      ran: what the trunk gave for them.
      next_token_ids: i32[T], the token after each; an MTP block alone reads it.
      call: the call's indices.
      config: the model.

    Returns:
      [T, n, D]: of DSpark stages the means after the target layers, of an MTP block its streams.
    """
    if config.dspark is not None:
        assert ran.means is not None
        return ran.means
    block_tokens = ran.cache.block_tokens
    return mtp.join_tokens(
        params, ran.streams, next_token_ids, call.positions, block_tokens, config
    )


def stage_context(
    params: DSV4Params,
    cache: ModelCache,
    new_tokens: Mapping[str, Family],
    call: CallIndices,
    read: jax.Array,
    config: DSV4Config,
) -> Mapping[str, Family]:
    """Joins what the draft's rings keep of a call's tokens to what the trunk staged.

    An entry depends on what the draft reads of its own token alone.

    Args:
      params: model parameters, with a draft.
      cache: the cache before the step's tokens are committed.
      new_tokens: staged tokens, by attention type.
      call: the call's indices.
      read: [T, n, D], of `read_tokens`.
      config: the model.

    Source: deepseek_v4.md section 1.6, dspark.md section 3.
    """
    kind = mtp if config.dspark is None else dspark
    family = new_tokens[_SWA]
    own = kind.context_tokens(params, read, call.positions, cache.state[_SWA], config)
    for layer, new in zip(draft_layers(config), own, strict=True):
        family = put_layer(family, layer.family_idx, new)
    return {**new_tokens, _SWA: family}


def propose(
    params: DSV4Params,
    cache: ModelCache,
    slots: jax.Array,
    lengths: jax.Array,
    anchor_ids: jax.Array,
    read: jax.Array,
    sampling: Sampling,
    counts: DrawnCounts | None,
    *,
    config: DSV4Config,
    draft_tokens: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Guesses the tokens that follow each row's last drawn one.

    They are drawn with the noise of the position that they guess at, the same that the token there
    will be drawn with, so that sampled rows keep as many as they can.

    Args:
      params: model parameters, with a draft.
      cache: the cache with the step's tokens committed.
      slots: i32[B], slot of each row; -1 for one that wants no guess.
      lengths: i32[B], tokens of each row in the cache; the anchor is the one after them.
      anchor_ids: i32[B], the last drawn tokens.
      read: [B, n, D], of `read_tokens`, of each row's last token in the cache.
      sampling: settings of each row.
      counts: what rows had drawn before the step; what they draw in it changes no guess.
      config: the model.
      draft_tokens: k, 1 or more; static.

    Returns:
      i32[B, k], and f32[B, k], `Drafts.confidence`, or None of an MTP block; of rows that want no
      guess they mean nothing.
    """
    rows = slots, lengths, anchor_ids
    if config.dspark is None:
        settings = sampling, counts, config, draft_tokens
        return _guess_ahead(params, cache, *rows, read, *settings), None
    block = propose_block(params, cache, *rows, sampling, counts, config=config)
    return block.token_ids[:, :draft_tokens], block.confidence[:, :draft_tokens]


def propose_block(
    params: DSV4Params,
    cache: ModelCache,
    slots: jax.Array,
    lengths: jax.Array,
    anchor_ids: jax.Array,
    sampling: Sampling,
    counts: DrawnCounts | None,
    *,
    config: DSV4Config,
) -> dspark.Drafts:
    """`propose` of DSpark stages: the chain of a whole block.

    Source: dspark.md sections 4 and 5.
    """
    spec = config.dspark
    assert spec is not None
    blocks = Blocks(slots=slots, lengths=lengths, size=spec.block_size)
    guesses = dspark.run_blocks(params, anchor_ids, blocks, cache.state[_SWA], config)

    def choose(logits: jax.Array, row: int) -> jax.Array:
        return guess(logits, sampling, lengths + row + 1, counts, config.idea.sampler)

    return dspark.chain(params, anchor_ids, guesses, choose)


def _guess_ahead(
    params: DSV4Params,
    cache: ModelCache,
    slots: jax.Array,
    lengths: jax.Array,
    anchor_ids: jax.Array,
    read: jax.Array,
    sampling: Sampling,
    counts: DrawnCounts | None,
    config: DSV4Config,
    draft_tokens: int,
) -> jax.Array:
    """`propose` of an MTP block: i32[B, k].

    It runs each row's last token, and then its own guesses, each on the streams that it gave for
    the one before. What it appends of those goes to a copy of its ring that ends with the step.

    Source: deepseek_v4.md section 1.6.
    """
    family_idx = draft_layers(config)[0].family_idx

    def choose(streams: jax.Array, ahead: jax.Array | int) -> jax.Array:
        logits = mtp.draft_logits(params, streams, config)
        return guess(logits, sampling, lengths + ahead + 1, counts, config.idea.sampler)

    handle = cache.layer(AttentionType.SWA, family_idx, next_call(slots, lengths - 1))
    _, streams = mtp.run_draft(params, read, anchor_ids, handle, config)
    first = choose(streams, 0)
    if draft_tokens == 1:
        return first[:, None]
    ring = jax.tree.map(lambda plane: plane[family_idx][None], cache.state[_SWA])

    def guess_next(
        carry: tuple[StateCachePool, jax.Array, jax.Array], ahead: jax.Array
    ) -> tuple[tuple[StateCachePool, jax.Array, jax.Array], jax.Array]:
        ring, streams, token = carry
        call = next_call(slots, lengths + ahead - 1)
        handle = LayerCacheHandle(
            paged=None,
            state=ring,
            layer=jnp.asarray(0, jnp.int32),
            call=call,
            schema=ring.schema,
            in_place=True,
        )
        read = mtp.join_tokens(
            params, streams, token, call.positions, ring.schema.block_tokens, config
        )
        handle, streams = mtp.run_draft(params, read, token, handle, config)
        guessed = choose(streams, ahead)
        return (handle.state, streams, guessed), guessed

    ahead = jnp.arange(1, draft_tokens, dtype=jnp.int32)
    _, more = jax.lax.scan(guess_next, (ring, streams, first), ahead)
    return jnp.concatenate([first[:, None], more.T], axis=1)
