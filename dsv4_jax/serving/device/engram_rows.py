"""Rows of the Engram tables for a step, gathered on the host while it is planned.

N-grams look back beyond the step's tokens, to those that a request has in the cache: whether it has
read them itself, or came from a prefix or a fork, the host knows their ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4_jax.engram import EngramRows, EngramTables


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
