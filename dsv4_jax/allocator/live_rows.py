"""Which rows of a cache its lengths make readable, by family of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4_jax.cache.model_cache import ModelCache

Rows = tuple[np.ndarray, np.ndarray]


class Ring(NamedTuple):
    """What a slot has of a family that is not of blocks.

    Attributes:
      num_live: how many of the last tokens are readable.
      num_rows: rows of a slot; the token at position p is in row p % num_rows.
      sums_up: one row stands for all tokens of an open window, and changes with each of them.
    """

    num_live: int
    num_rows: int
    sums_up: bool = False


def live_rows(cache: ModelCache, lengths: np.ndarray, table: np.ndarray) -> dict[str, Rows]:
    """By family, the rows that lengths make readable: block and offset, or slot and row."""
    live: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for slot in np.flatnonzero(lengths > 0):
        length = int(lengths[slot])
        for attn, pool in cache.paged.items():
            entries = np.arange(length // pool.schema.compression_ratio)
            per_block = pool.schema.entries_per_block
            rows = (table[slot][entries // per_block], entries % per_block)
            live.setdefault(f"{attn}.entries", []).append(rows)
            if pool.index_keys is not None:
                live.setdefault(f"{attn}.index_keys", []).append(rows)
        for name, ring in rings_of(cache, length).items():
            rows = np.arange(max(length - ring.num_live, 0), length) % ring.num_rows
            live.setdefault(name, []).append((np.full(len(rows), slot), rows))
    return {
        name: (np.concatenate([a for a, _ in rows]), np.concatenate([b for _, b in rows]))
        for name, rows in live.items()
    }


def rings_of(cache: ModelCache, length: int) -> dict[str, Ring]:
    """By family, what a slot of that length has."""
    rings = {}
    for attn, pool in cache.state.items():
        schema = pool.schema
        if pool.window:
            rings[f"{attn}.window"] = Ring(schema.swa_window_size, schema.swa_window_size)
        compression_ratio = schema.compression_ratio
        if pool.pending is not None:
            rings[f"{attn}.pending"] = Ring(length % compression_ratio, schema.pending_tokens)
        for name in ("tail", "index_tail"):
            if getattr(pool, name) is not None:
                # The b-stream lives for the next window, the a-stream for its own.
                rings[f"{attn}.{name}.previous"] = Ring(
                    compression_ratio + length % compression_ratio, 2 * compression_ratio
                )
                rings[f"{attn}.{name}.own"] = Ring(
                    length % compression_ratio, 2 * compression_ratio
                )
        if pool.running is not None:
            rings[f"{attn}.running"] = Ring(min(length % compression_ratio, 1), 1, sums_up=True)
    return rings
