"""Selections that leave candidates for later ones, and selections among them, on a cache.

Candidates are blocks of entries on a fixed grid, as of `EntrySources`. They are kept as numbers of
blocks, ascending, so that what is read of them is in the order of entries.

Source: deepseek_v41.md section 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.config.sources import Candidates
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.chunks import map_tokens
from pallas_kernels.index_scores import listed_scores
from pallas_kernels.select_top_k.reference import select_top_k

_OF_TOKENS = ("segment_ids", "slots", "positions", "lengths")
"""Fields of a call that have a value for each token."""


def count_blocks(max_entries: int, candidates: Candidates | None) -> int:
    """Blocks that are kept of a table row's entries; 0 where they would be all that there are."""
    if candidates is None or max_entries <= candidates.blocks * candidates.block_size:
        return 0
    return candidates.blocks


def best_blocks(
    scores: jax.Array,
    visible: jax.Array,
    candidates: Candidates,
    *,
    select: Callable[[jax.Array, jax.Array, int], jax.Array] = select_top_k,
) -> jax.Array:
    """The blocks of the best scores, that of the newest entry always among them.

    Args:
      scores: f32[..., E]; what is not visible may be anything.
      visible: i32[...]; a query sees entries 0 .. visible - 1.
      candidates: how many blocks of which size; of equals the first ones are kept.
      select: `pk.select_top_k` of rows, or its definition, which takes any leading axes.

    Returns:
      i32[..., blocks], ascending, then -1.
    """
    size, num_entries = candidates.block_size, scores.shape[-1]
    num_blocks = -(-num_entries // size)
    seen = jnp.arange(num_entries).reshape([1] * visible.ndim + [-1]) < visible[..., None]
    spare = [(0, 0)] * visible.ndim + [(0, num_blocks * size - num_entries)]
    padded = jnp.pad(jnp.where(seen, scores, -jnp.inf), spare, constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*visible.shape, num_blocks, size), axis=-1)
    newest = jnp.arange(num_blocks).reshape([1] * visible.ndim + [-1])
    newest = newest == ((visible - 1) // size)[..., None]
    best = jnp.where(newest & (visible > 0)[..., None], jnp.inf, best)
    return select(best, -(-visible // size), min(candidates.blocks, num_blocks))


def entries_of_blocks(blocks: jax.Array, visible: jax.Array, size: int) -> jax.Array:
    """i32[..., n] and i32[...] -> i32[..., n * size], the visible entries, ascending, then -1."""
    offsets = jnp.arange(size, dtype=jnp.int32).reshape([1] * blocks.ndim + [-1])
    numbers = blocks[..., None] * size + offsets
    is_seen = (blocks[..., None] >= 0) & (numbers < visible[..., None, None])
    return jnp.where(is_seen, numbers, -1).reshape(*blocks.shape[:-1], -1)


def select_and_limit(
    handle: LayerCacheHandle, queries: jax.Array, weights: jax.Array, candidates: Candidates
) -> tuple[jax.Array, jax.Array]:
    """What a layer selects of all entries, and the blocks that it leaves to later selections.

    Args:
      handle: after the layer's entries were written.
      queries: [T, IH, IC], rotated and rounded as the keys are.
      weights: f32[T, IH].
      candidates: what to leave.

    Returns:
      i32[T, K] and i32[T, blocks], ascending, then -1.
    """
    k = min(handle.schema.indexer_top_k, handle.max_entries)

    def select(some: dict[str, jax.Array], _: jax.Array) -> jax.Array:
        visible, call = some["visible"], _call_of(handle, some)
        scores = pk.index_scores(some["queries"], some["weights"], handle.stored_index_keys, call)
        selected = pk.select_top_k(scores, visible, k)
        blocks = best_blocks(scores, visible, candidates, select=pk.select_top_k)
        return jnp.concatenate([selected, blocks], axis=1)

    found = _map(handle, select, queries, weights, handle.max_entries)
    return _widen(found[:, :k], handle.schema.indexer_top_k), found[:, k:]


def select_inside(
    handle: LayerCacheHandle,
    queries: jax.Array,
    weights: jax.Array,
    blocks: jax.Array,
    candidates: Candidates,
) -> jax.Array:
    """What a layer selects of candidates, of which no other key is read.

    Args:
      handle: as in `select_and_limit`.
      queries: as there.
      weights: as there.
      blocks: i32[T, blocks], as an earlier layer left them.
      candidates: of what size they are.

    Returns:
      i32[T, K], ascending, then -1.
    """
    width = blocks.shape[1] * candidates.block_size
    k = min(handle.schema.indexer_top_k, width)

    def select(some: dict[str, jax.Array], _: jax.Array) -> jax.Array:
        listed = entries_of_blocks(some["blocks"], some["visible"], candidates.block_size)
        count = jnp.sum(listed >= 0, axis=1, dtype=jnp.int32)  # the first ones, as blocks ascend
        call, pool = _call_of(handle, some), handle.stored_index_keys
        scores = listed_scores(some["queries"], some["weights"], pool, call, listed)
        places = pk.select_top_k(scores, count, k)
        found = jnp.take_along_axis(listed, jnp.maximum(places, 0), axis=1)
        return jnp.where(places >= 0, found, -1)

    found = _map(handle, select, queries, weights, width, blocks=blocks)
    return _widen(found, handle.schema.indexer_top_k)


def _call_of(handle: LayerCacheHandle, some: dict[str, jax.Array]) -> CallIndices:
    """The call, of some of its tokens."""
    return dataclasses.replace(
        handle.call, **{name: some[name] for name in (*_OF_TOKENS, "visible")}
    )


def _map(
    handle: LayerCacheHandle,
    select: Callable[[dict[str, jax.Array], jax.Array], jax.Array],
    queries: jax.Array,
    weights: jax.Array,
    num_keys: int,
    **more: jax.Array,
) -> jax.Array:
    arrays = {
        "queries": queries,
        "weights": weights,
        "visible": handle.visible_entries,
        **{name: getattr(handle.call, name) for name in _OF_TOKENS},
        **more,
    }
    return map_tokens(select, arrays, elements_per_token=num_keys)


def _widen(selected: jax.Array, width: int) -> jax.Array:
    spare = ((0, 0), (0, width - selected.shape[1]))
    return jnp.pad(selected, spare, constant_values=-1)
