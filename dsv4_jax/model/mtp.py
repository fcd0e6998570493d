"""The draft (MTP) block: from the trunk's streams and the next token to the one after it.

On a cache it is run for tokens alone that a guess follows; of all others its ring takes entries.

Source: deepseek_v4.md section 1.6.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv4_jax.attention.full_sequence import attend_full_sequence
from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import Output
from dsv4_jax.attention.shared_entries import Shared
from dsv4_jax.attention.swa import window_tokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.new_tokens import NewTokens
from dsv4_jax.cache.schema import FormatName, choose_cache_format
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.collectives import join_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layer
from dsv4_jax.linear import linear
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.block import block, run_block
from dsv4_jax.model.draft_params import MTPParams
from dsv4_jax.model.hyper_connections import Residual, read_streams
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import head, look_up, start_residual
from dsv4_jax.peers import using
from pallas_kernels.common.backend import Backend
from pallas_kernels.common.formats import get_cache_format
from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.weights import with_activations


def forward_draft(
    params: DSV4Params,
    streams: jax.Array,
    next_token_ids: jax.Array,
    *,
    config: DSV4Config,
    cache_format: FormatName | None = None,
    activations: str = DEFAULT_ACTIVATIONS,
) -> jax.Array:
    """Draft logits of whole sequences, without a cache.

    Args:
      params: model parameters, with a draft block.
      streams: [B, T, S, D], the trunk's residual streams (`forward_streams`).
      next_token_ids: i32[B, T], the token at i + 1 for every position i.
      config: the model.
      cache_format: as in `forward`.
      activations: as in `forward`.

    Returns:
      f32[B, T, V], for the token at i + 2.

    Raises:
      ValueError: the parameters have no draft block, or there is no such format or form.
    """
    params = with_activations(params, activations)
    draft = mtp_block(params)
    fmt = get_cache_format(choose_cache_format(config, cache_format, "f32"))

    def attention(layer: AttentionParams, x: jax.Array) -> tuple[Shared, Output]:
        return attend_full_sequence(layer, x, draft_layer(config, 0), config, fmt)

    streams = draft_input(draft, params.embed[next_token_ids], streams, config)
    residual = Residual.start(streams)
    _, residual = block(
        draft.block, residual, next_token_ids, config, attention, backend=Backend.REFERENCE
    )
    return draft_logits(params, residual.written(), config)


def mtp_block(params: DSV4Params) -> MTPParams:
    """The parameters of the MTP block.

    Raises:
      ValueError: there is no draft, or one of another kind.
    """
    if not isinstance(params.mtp, MTPParams):
        held = "None" if params.mtp is None else "of DSpark stages"
        raise ValueError(f"params.mtp must be a draft (MTP) block, and is {held}")
    return params.mtp


def join_tokens(
    params: DSV4Params,
    streams: jax.Array,
    next_token_ids: jax.Array,
    positions: jax.Array,
    block_tokens: int,
    config: DSV4Config,
) -> jax.Array:
    """What the draft block reads of tokens.

    The last token of a block takes a zero embedding for its next token. What the ring holds below
    a block boundary then follows from the tokens before the boundary alone, so that a snapshot of
    it serves any continuation.

    Args:
      params: model parameters, with a draft block.
      streams: [T, S, D], residual streams of the trunk or, beyond what the trunk has run, of the
        draft block itself.
      next_token_ids: i32[T], the token after each.
      positions: i32[T].
      block_tokens: tokens of a block.
      config: the model.

    Returns:
      [T, S, D].
    """
    ends_block = (positions + 1) % block_tokens == 0
    # Of a prompt's tokens this needs nothing of the trunk: it may not go through its peer buffers.
    embedded = jnp.where(ends_block[:, None], 0, look_up(params.embed, next_token_ids))
    return draft_input(mtp_block(params), embedded, streams, config)


def context_tokens(
    params: DSV4Params,
    joined: jax.Array,
    positions: jax.Array,
    state: StateCachePool,
    config: DSV4Config,
) -> list[NewTokens]:
    """What the draft block's ring keeps of a call's tokens, which are not run for it.

    It is one layer, so that an entry follows from what the block reads of its own token alone.

    Args:
      params: model parameters, with a draft block.
      joined: [T, S, D], of `join_tokens`.
      positions: i32[T].
      state: the pool of window layers.
      config: the model.

    Returns:
      What the one layer is to commit.
    """
    layer = mtp_block(params).block
    residual = start_residual(joined)
    mix = read_streams(layer.hc_attn, layer.attn_norm, residual, config, "attn_hc")
    x = join_rows(mix.normed, joined.shape[0])
    return window_tokens([layer.attn], x, positions, state, config)


def run_draft(
    params: DSV4Params,
    joined: jax.Array,
    next_token_ids: jax.Array,
    handle: LayerCacheHandle,
    config: DSV4Config,
) -> tuple[LayerCacheHandle, jax.Array]:
    """The draft block on its window ring.

    Args:
      params: model parameters, with a draft block.
      joined: [T, S, D], of `join_tokens`.
      next_token_ids: i32[T], the token after each.
      handle: the draft layer's cache in this call.
      config: the model.

    Returns:
      The handle, and streams [T, S, D], of which `draft_logits` makes logits for the token after
      the next.
    """
    layer, residual = mtp_block(params).block, start_residual(joined)
    handle, _, residual = run_block(layer, residual, next_token_ids, handle, config, params.peers)
    with using(params.peers):
        return handle, join_rows(residual.written(), next_token_ids.shape[0])


def draft_logits(params: DSV4Params, streams: jax.Array, config: DSV4Config) -> jax.Array:
    """[..., S, D] of `run_draft` -> f32[..., V]."""
    draft = mtp_block(params)
    return head(draft.hc_head, draft.norm, params.head, streams, config)


def draft_input(
    draft: MTPParams, embedded: jax.Array, streams: jax.Array, config: DSV4Config
) -> jax.Array:
    """Joins the next token's embedding [..., D] to each stream of [..., S, D]."""
    token = linear(rms_norm(embedded, draft.enorm, eps=config.rms_norm_eps), draft.e_proj)
    hidden = linear(rms_norm(streams, draft.hnorm, eps=config.rms_norm_eps), draft.h_proj)
    return hidden + token[..., None, :]
