"""What a step has appended: lengths of slots, and blocks that it has filled."""

from __future__ import annotations

import numpy as np

from dsv4_jax.serving.schedule.flight import Flight
from dsv4_jax.serving.schedule.request_queue import RequestQueue


def count_appended(
    flight: Flight, num_kept: np.ndarray, drawn: np.ndarray, queue: RequestQueue
) -> None:
    """Counts what a step appended, and makes blocks that it has filled known.

    Args:
      flight: the step.
      num_kept: i32[B], tokens of each row that stay in the cache.
      drawn: i32[B, m], what each row drew, in order.
      queue: the requests, and who holds which blocks.
    """
    rows, alive, shards = flight.rows, flight.alive, queue.shards
    slots, num_tokens = rows.slots[alive], rows.num_tokens[alive]
    size = shards.managers[0].plan.block_tokens
    kept = num_kept[slots]
    before = shards.length_tokens[slots]
    after = before + kept
    queue.check_room(slots, after)
    shards.advance(slots, kept)
    for row in (after // size > before // size).nonzero()[0].tolist():
        request = flight.running[int(slots[row])]
        token_ids = request.token_ids[: before[row] + num_tokens[row]]
        if more := int(kept[row] - num_tokens[row]):  # kept drafts are what was drawn
            token_ids = np.concatenate([token_ids, drawn[request.slot, :more]])
        manager, own = shards.of(request.slot)
        manager.share(own, token_ids)
