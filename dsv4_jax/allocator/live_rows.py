"""Which rows of a cache its lengths make readable, by family of arrays."""

from __future__ import annotations

import numpy as np

from dsv4_jax.cache.model_cache import ModelCache

Rows = tuple[np.ndarray, np.ndarray]


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
        for name, (count, ring) in ring_rows(cache, length).items():
            rows = np.arange(max(length - count, 0), length) % ring
            live.setdefault(name, []).append((np.full(len(rows), slot), rows))
    return {
        name: (np.concatenate([a for a, _ in rows]), np.concatenate([b for _, b in rows]))
        for name, rows in live.items()
    }


def ring_rows(cache: ModelCache, length: int) -> dict[str, tuple[int, int]]:
    """By ring family, how many of the last tokens are live, and the ring's rows."""
    rows = {}
    for attn, pool in cache.state.items():
        schema = pool.schema
        rows[f"{attn}.window"] = (schema.swa_window_size, schema.swa_window_size)
        ratio = schema.compression_ratio
        for name in ("tail", "index_tail"):
            if getattr(pool, name) is not None:
                # The b-stream lives for the next window, the a-stream for its own.
                rows[f"{attn}.{name}.previous"] = (ratio + length % ratio, 2 * ratio)
                rows[f"{attn}.{name}.own"] = (length % ratio, 2 * ratio)
        if pool.running is not None:
            rows[f"{attn}.running"] = (min(length % ratio, 1), 1)
    return rows
