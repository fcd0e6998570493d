"""The last token ids of each slot, which n-grams of a call's tokens look back to.

They are a ring, as the window is, of one layer and with an id in the place of an entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dsv4_jax.cache.commit import commit_tokens
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, NewTokens, put_layer
from dsv4_jax.cache.state_cache import TOKEN_IDS
from pallas_kernels.common.call import CallIndices


def look_back(cache: ModelCache, token_ids: jax.Array, call: CallIndices) -> jax.Array:
    """i32[T, n], ids of a call's tokens and of those before them, the nearest first; -1 is none.

    Those before the call are what the slots keep.
    """
    kept = cache.state[TOKEN_IDS].window["ids"][0]
    found = [token_ids]
    for back in range(1, kept.shape[1] + 1):
        position = call.positions - back
        in_call = jnp.roll(token_ids, back)
        before = kept[jnp.maximum(call.slots, 0), jnp.maximum(position, 0) % kept.shape[1]]
        token = jnp.where(position >= call.lengths, in_call, before)
        found.append(jnp.where(position >= 0, token, -1))
    live = call.segment_ids >= 0
    return jnp.where(live[:, None], jnp.stack(found, axis=1), -1)


def keep_token_ids(
    cache: ModelCache,
    staged: Mapping[str, Family] | None,
    token_ids: jax.Array,
    call: CallIndices,
) -> tuple[ModelCache, Mapping[str, Family] | None]:
    """Commits the ids of a call's tokens, or stages them for a later commit."""
    new = NewTokens(window={"ids": token_ids}, compressor=None, indexer=None)
    layer = jnp.zeros((), jnp.int32)
    if staged is not None:
        return cache, {**staged, TOKEN_IDS: put_layer(staged[TOKEN_IDS], 0, new)}
    state = commit_tokens(cache.state[TOKEN_IDS], new, call, layer=layer)
    return dataclasses.replace(cache, state={**cache.state, TOKEN_IDS: state}), None
