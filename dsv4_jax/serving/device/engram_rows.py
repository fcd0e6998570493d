"""Rows of the Engram tables for a step, gathered on the host while it is planned.

N-grams look back beyond the step's tokens, to those that a request has in the cache: whether it has
read them itself, or came from a prefix or a fork, the host knows their ids.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Sequence

import numpy as np

from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.engram import EngramRows, EngramTables
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.schedule.running import Running
from dsv4_jax.serving.schedule.scheduler import StepPlan


class RowStager:
    """Gathers the rows of each step of which the host knows the tokens, and counts what that takes.

    Rows of a mapped file that are not in the host's memory are read from its disk, which the kernel
    counts as major page faults of the thread that waits.
    """

    def __init__(self, tables: EngramTables | None, metrics: Metrics) -> None:
        """Of a model's tables; None stages nothing."""
        self._tables, self._metrics = tables, metrics

    def stage(
        self,
        step: StepInput,
        plan: StepPlan,
        running: Running,
        lengths: np.ndarray,
        starts: np.ndarray,
        is_fed: np.ndarray,
    ) -> StepInput:
        """The step with its rows, or as it is where the device looks them up.

        Args:
          step: tokens, in NumPy.
          plan: the step.
          running: requests by slot.
          lengths: i32[NS], tokens of each slot before the step.
          starts: i[n], place of each row's first token in the step.
          is_fed: bool[n], rows whose tokens the host has not read.
        """
        rows = plan.rows
        if self._tables is None or plan.num_steps > 1 or is_fed.any():
            return step
        ids = [running[slot].token_ids for slot in rows.slots.tolist()]
        counts = rows.num_tokens + rows.num_drafts
        begin_s, faults = time.perf_counter(), _major_faults()
        token_ids = np.asarray(step.token_ids)
        engram = stage_rows(self._tables, token_ids, ids, lengths[rows.slots], starts, counts)
        if len(rows):
            self._metrics.engram_s.add(time.perf_counter() - begin_s)
            self._metrics.engram_waits += _major_faults() - faults
            config = self._tables.config
            self._metrics.engram_rows += int(counts.sum()) * config.num_columns * len(config.layers)
        return dataclasses.replace(step, engram=engram)


def _major_faults() -> int:
    """Page faults of this thread for which something was read."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def stage_rows(
    tables: EngramTables,
    token_ids: np.ndarray,
    known: Sequence[Sequence[int] | np.ndarray],
    lengths: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
) -> EngramRows:
    """What the tokens of a step read; of padding zeros.

    Args:
      tables: of the model.
      token_ids: i32[T], of the step, drafts included.
      known: of each row that has tokens, the ids of its request.
      lengths: i[B], how many of them the cache has.
      starts: i[B], place of the row's first token in the step.
      counts: i[B], tokens of the row.
    """
    width = tables.config.max_ngram
    places, backs = [np.zeros(0, np.int64)], [np.zeros((0, width), np.int64)]
    for ids, *numbers in zip(known, lengths, starts, counts, strict=True):
        length, start, count = map(int, numbers)
        before = np.full(width - 1, -1, np.int64)
        seen = ids[max(length - (width - 1), 0) : length]
        if len(seen):
            before[-len(seen) :] = seen
        whole = np.concatenate([before, token_ids[start : start + count]])
        backs.append(np.lib.stride_tricks.sliding_window_view(whole, width)[:, ::-1])
        places.append(np.arange(start, start + count))
    return tables.take_some(np.concatenate(backs), np.concatenate(places), len(token_ids))
