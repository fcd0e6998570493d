"""Engram tables of random contents in host memory, and decode steps that wait for rows of them.

An engine gathers the rows of a step on the host once it has read the tokens of the step before, so
nothing of the gathering overlaps with a step.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from dsv4_jax.bench.timing import dispatch, repeat
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.engram import GROUP, EngramConfig
from dsv4_jax.engram import EngramRows, EngramTable, EngramTables

_SCALE = 119
"""2^-8 in UE8M0, so that the largest values are below 2."""
_PATTERN_BYTES = 2**24
"""Random bytes that a table repeats: filling it costs a copy, and no row is like the next."""
_REPEATS = 3


def reduced(config: EngramConfig, rows: int | None) -> EngramConfig:
    """Tables of about so many rows each; None is as many as the model has.

    Raises:
      ValueError: there are more rows than those of the model, or fewer than columns.
    """
    if rows is None:
        return config
    most = max(config.table_rows)
    if not config.num_columns * 2 <= rows <= most:
        raise ValueError(
            f"--engram-rows must be in {config.num_columns * 2}..{most} or all, got {rows}"
        )
    return dataclasses.replace(config, least_prime=rows // config.num_columns)


def table_bytes(config: EngramConfig) -> int:
    """Bytes of all tables in the formats of the release: E4M3, and a scale for 32 columns."""
    return sum(config.table_rows) * (config.head_dim + -(-config.head_dim // GROUP))


def make_tables(config: DSV4Config, rows: int | None) -> EngramTables:
    """Tables in host memory, every page of which is written.

    Threads copy a random pattern into them, so that the full height takes about as long as the
    host needs to hand out and write its memory.

    Args:
      config: a model with tables.
      rows: as of `reduced`.
    """
    assert config.engram is not None
    sizes = reduced(config.engram, rows)
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, 127, _PATTERN_BYTES, np.uint8)  # E4M3 above 0; 127 is NaN
    pattern |= rng.integers(0, 2, _PATTERN_BYTES, np.uint8) << 7
    tables = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for count in sizes.table_rows:
            codes = np.empty((count, sizes.head_dim), np.uint8)
            scale = np.empty((count, -(-sizes.head_dim // GROUP)), np.uint8)
            whole, scales = codes.reshape(-1), scale.reshape(-1)

            def fill(start: int, whole: np.ndarray = whole) -> None:
                part = whole[start : start + _PATTERN_BYTES]
                part[:] = pattern[: len(part)]

            def fill_scale(start: int, scales: np.ndarray = scales) -> None:
                scales[start : start + _PATTERN_BYTES] = _SCALE

            list(pool.map(fill, range(0, len(whole), _PATTERN_BYTES)))
            list(pool.map(fill_scale, range(0, len(scales), _PATTERN_BYTES)))
            tables.append(EngramTable(codes.view(ml_dtypes.float8_e4m3fn), scale))
    normalized = np.arange(config.vocab_size) % sizes.num_normalized_ids
    return EngramTables(sizes, normalized, tuple(tables), "")


def time_reads(
    tables: EngramTables,
    state: Any,
    *,
    batch: int,
    calls: int,
    limit_s: float,
    put: Callable[[EngramRows], EngramRows],
    step: Callable[[Any, EngramRows], Any],
    rewind: Callable[[Any], Any],
) -> tuple[dict[str, Any], Any]:
    """Times steps one after the other, each of which waits for its rows.

    Args:
      tables: in host memory.
      state: what `step` takes and gives.
      batch: B, requests; their last tokens are drawn anew for every step.
      calls: steps of a measurement.
      limit_s: no measurement begins later than this.
      put: brings rows to the devices.
      step: a step with those rows; the state after it.
      rewind: makes a state fit for so many steps.

    Returns:
      `engram_ms` to gather rows on the host, `engram_put_ms` to bring them to the devices and
      `engram_step_ms` of gathering, bringing and a step, medians of a few measurements, with
      `engram_table_bytes` and `engram_rows_read` of a step; and the state.
    """
    rng, sizes = np.random.default_rng(1), tables.config
    parts: list[tuple[float, float]] = []

    def call(state: Any) -> Any:
        back = rng.integers(0, len(tables.normalized), (batch, sizes.max_ngram))
        start = time.perf_counter()
        rows = tables.take(back)
        taken_s = time.perf_counter() - start
        brought_s, placed = dispatch(lambda _: put(rows), None, 1)
        parts.append((taken_s, brought_s))
        return dispatch(lambda state: step(state, placed), state, 1)[1]

    def measure() -> tuple[float, float, float]:
        nonlocal state
        parts.clear()
        seconds, state = dispatch(call, rewind(state), calls)
        taken_s, brought_s = map(sum, zip(*parts, strict=True))
        return taken_s / calls, brought_s / calls, seconds / calls

    found = repeat(measure, least=2, most=_REPEATS + 1, limit_s=limit_s)
    medians = [statistics.median(column) * 1e3 for column in zip(*found[1:], strict=True)]
    row = dict(zip(("engram_ms", "engram_put_ms", "engram_step_ms"), medians, strict=True))
    row |= {
        "engram_table_bytes": tables.num_bytes,
        "engram_rows_read": batch * len(sizes.layers) * sizes.num_columns,
    }
    return row, state
