"""Which entries a query of a CSA layer attends to: by the model's indexer, or by an idea."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax import checks
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.schema import check_selector
from dsv4_jax.collectives import gather_over_model
from dsv4_jax.config import DSV4Config
from pallas_kernels.select_top_k.reference import select_top_k


class Selection(NamedTuple):
    """What a selector of CSA entries sees.

    Over whole sequences, B counts sequences and T their tokens. In a step on a cache every token is
    a row of its own: B counts the call's tokens, T is 1, and E is what the block table can address.

    Attributes:
      scores: f32[B, T, E], index scores; arbitrary where a query may not see the entry.
      visible: i32[B, T]; a query sees entries 0 .. visible - 1.
      positions: i32[B, T], of the queries; 0 for padding.
      top_k: entries that the model would select.
      queries: [B, T, H, C], queries of the attention.
      entries: f32[B, E, C], entries that the attention would read; likewise arbitrary.
    """

    scores: jax.Array
    visible: jax.Array
    positions: jax.Array
    top_k: int
    queries: jax.Array
    entries: jax.Array


Selector = Callable[[Selection], jax.Array]
"""Gives bool[B, T, E], the entries that each query attends to; those it may not see don't count."""


def select_by_score(selection: Selection) -> jax.Array:
    """The model's own selector: the best index scores."""
    num_entries = selection.scores.shape[-1]
    selected = select_top_k(selection.scores, selection.visible, min(selection.top_k, num_entries))
    return to_mask(checkpoint_name(selected, "idx/topk"), num_entries)


def visible_entries(selection: Selection) -> jax.Array:
    """bool[B, T, E], the entries that each query may see."""
    return jnp.arange(selection.scores.shape[-1])[None, None] < selection.visible[..., None]


def select(selector: Selector, selection: Selection, max_selected: int | None) -> jax.Array:
    """What a selector selects of the entries that there are: bool[B, T, E].

    Raises:
      ValueError: it gives no such array.
    """
    shape = selection.scores.shape
    mask: Any = selector(selection)
    if getattr(mask, "shape", None) != shape or mask.dtype != bool:
        checks.refuse(
            "what a selector gives",
            f"bool{list(shape)}, as the scores",
            mask,
            "a pooling or a sampler is no selector: put it into an Idea, by its name",
        )
    mask &= visible_entries(selection)
    return mask if max_selected is None else to_mask(_to_indices(mask, max_selected), shape[-1])


def select_on_cache(
    handle: LayerCacheHandle,
    queries: jax.Array,
    index_queries: jax.Array,
    weights: jax.Array,
    config: DSV4Config,
) -> tuple[jax.Array, jax.Array]:
    """The entries that each token of a call attends to.

    Args:
      handle: a CSA layer's cache, after the call's tokens were appended.
      queries: [T, H, C], of the attention.
      index_queries: [T, IH, IC], rotated and rounded as the keys are.
      weights: f32[T, IH].
      config: the model.

    Returns:
      i32[T, K], ascending, then -1; and `queries`. Where blocks are split, entries are in any order
      and queries those of all devices.

    Raises:
      ValueError: an idea would select, and blocks are split.
    """
    selector = config.idea.selector
    if selector is None:
        selected, (heads,) = handle.select_for((queries,), index_queries, weights)
        return selected, heads
    check_selector(config, split_cache=handle.is_split)

    def select_some(some: dict[str, jax.Array], entries: jax.Array) -> jax.Array:
        selection = Selection(
            scores=some["scores"][:, None],
            visible=some["visible"][:, None],
            positions=some["positions"][:, None],
            top_k=config.indexer_top_k,
            queries=some["queries"][:, None],
            entries=entries,
        )
        mask = select(selector, selection, config.idea.max_selected)[:, 0]
        return _to_indices(mask, selected_width(handle.max_entries, config))

    heads = gather_over_model(queries)  # on a mesh a device has its own heads alone
    tokens = {
        "queries": jnp.moveaxis(heads, 0, 1).reshape(queries.shape[0], -1, queries.shape[-1]),
        "scores": handle.scores(index_queries, weights),
        "visible": handle.visible_entries,
        "positions": handle.positions,
    }
    return handle.map_entries(select_some, tokens), queries


def selected_width(max_entries: int, config: DSV4Config) -> int:
    """K of `select_on_cache`, where a row of the block table addresses `max_entries`."""
    if config.idea.selector is None:
        return config.indexer_top_k
    return config.idea.max_selected or max_entries


def _to_indices(mask: jax.Array, width: int) -> jax.Array:
    """bool[..., E] -> i32[..., width]: the first entries that are True, ascending, then -1."""
    num_entries = mask.shape[-1]
    entries = jnp.arange(num_entries, dtype=jnp.int32).reshape([1] * (mask.ndim - 1) + [-1])
    order = jnp.where(mask, entries, num_entries)
    first = jnp.sort(order, axis=-1)[..., :width]
    spare = [(0, 0)] * (mask.ndim - 1) + [(0, width - first.shape[-1])]
    return jnp.pad(jnp.where(first < num_entries, first, -1), spare, constant_values=-1)


def to_mask(selected: jax.Array, num_entries: int) -> jax.Array:
    """i32[..., K], -1 for none -> bool[..., E]."""
    spare = jnp.where(selected < 0, num_entries, selected)
    mask = jnp.zeros((*selected.shape[:-1], num_entries + 1), bool)
    return jnp.put_along_axis(mask, spare, True, axis=-1, inplace=False)[..., :num_entries]
