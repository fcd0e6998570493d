"""Entries and index keys that a layer makes for others too: what closes them, and where they go.

An entry is made of M tokens, without the window before. Those that are not in the call wait in the
state, which keeps the last M - 1 tokens of a slot: the token at position p in row p % (M - 1).

    M = 2, calls of 3 and 2 tokens      positions  0 1 2 | 3 4
                                        entries    (0 1)   (2 3), of which 2 waited

Source: deepseek_v41.md section 6.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.new_tokens import Projections
from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor.closing import find_closing
from pallas_kernels.compressor.pooling import pool_at_once

_ROW_MULTIPLE = 8
"""Of rows of a product, at which a row's place changes no bit on a CPU (`step/step.py`)."""


class ClosedWindows(NamedTuple):
    """The windows that a call closes.

    Attributes:
      means: f32[n, C], the mean of each window's values, weighted by a softmax of their scores.
      closing: i32[n], the token of the call that closes it; -1 is none, whose mean is arbitrary.
      starts: i32[n], position of its first token.
    """

    means: jax.Array
    closing: jax.Array
    starts: jax.Array


def close_windows(handle: LayerCacheHandle, new: Projections) -> ClosedWindows:
    """Pools the windows that a call's tokens close.

    Args:
      handle: of a layer that makes entries; its pending tokens are those before the call.
      new: f32[T, C] each, what the call's tokens give; scores are not read where M is 1.
    """
    call, ratio = handle.call, handle.schema.ratio
    closing = find_closing(call, ratio)
    spare = -closing.shape[0] % _ROW_MULTIPLE if closing.shape[0] > _ROW_MULTIPLE else 0
    closing = jnp.pad(closing, (0, spare), constant_values=-1)
    token = jnp.maximum(closing, 0)
    starts = jnp.where(closing >= 0, call.positions[token] - (ratio - 1), 0)
    if handle.waiting is None:
        return ClosedWindows(new.values[token], closing, starts)
    pending = handle.waiting.pending
    assert pending is not None
    assert handle.entry_layer is not None
    values, scores = [], []
    slot, kept = jnp.maximum(call.slots[token], 0), handle.schema.pending_tokens
    for back in range(ratio - 1, -1, -1):
        position = jnp.maximum(call.positions[token] - back, 0)
        in_call = (position >= call.lengths[token])[:, None]
        for rows, name in ((values, "values"), (scores, "scores")):
            own = new.planes[name][jnp.maximum(token - back, 0)]
            waiting = pending[name][handle.entry_layer, slot, position % kept]
            rows.append(jnp.where(in_call, own, waiting))
    pool = pool_at_once(values, scores)
    return ClosedWindows(pool[:, 2] / pool[:, 1], closing, starts)


def write_entries(
    handle: LayerCacheHandle, entries: Planes, keys: Planes, closing: jax.Array
) -> LayerCacheHandle:
    """Puts entries and index keys into their blocks.

    Args:
      handle: of the layer that made them.
      entries: planes [n, ...] of the format's codec of entries.
      keys: planes [n, ...] of its codec of index keys.
      closing: i32[n], as of `close_windows`.
    """
    call, blocks = handle.call, handle.blocks
    assert handle.entry_layer is not None
    assert blocks.index_keys is not None
    token = jnp.maximum(closing, 0)
    segments = jnp.where(closing >= 0, call.segment_ids[token], -1)
    numbers = call.positions[token] // handle.schema.ratio
    pools = blocks.entries, blocks.index_keys
    written = (
        pk.flush_write(pool, rows, call.block_table, segments, numbers, layer=handle.entry_layer)
        for pool, rows in zip(pools, (entries, keys), strict=True)
    )
    paged = dataclasses.replace(
        blocks, **dict(zip(("entries", "index_keys"), written, strict=True))
    )
    return dataclasses.replace(handle, paged=paged)
