"""The block boundaries that requests come to in a step, where they are worth a snapshot."""

from __future__ import annotations

import numpy as np

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.serving.schedule.flight import Flight, Outlook
from dsv4_jax.serving.schedule.scheduler import StepPlan
from dsv4_jax.serving.schedule.snapshot_policy import Boundary, take_boundaries


def find_crossed(
    plan: StepPlan,
    outlook: Outlook,
    places: np.ndarray,
    flight: Flight | None,
    shards: DataShards,
) -> list[Boundary]:
    """Boundaries that a step may reach, which writes the snapshots itself, with a place each.

    One that the step in flight may reach, or just not, keeps its place: whichever of both crosses
    it writes there.

    Args:
      plan: the step.
      outlook: what requests hold before it.
      places: i64[n], of each row, the number of its request in `outlook.running`.
      flight: the step in flight, or None.
      shards: the cache's managers.
    """
    size, rows = shards.managers[0].plan.block_tokens, plan.rows
    starts, spread = outlook.lengths[places], outlook.spread[places]
    ends = starts + spread + rows.num_appended + rows.spread
    boundaries = []
    for row in np.flatnonzero(ends // size > starts // size).tolist():
        request, start = outlook.running.requests[places[row]], int(starts[row])
        unread: list[Boundary] = []
        if flight is not None and outlook.is_fed[places[row]]:
            unread = [boundary for boundary in flight.boundaries if boundary.slot == request.slot]
        kept = [boundary for boundary in unread if boundary.end > start]
        start = max([start + int(spread[row]), *(boundary.end for boundary in kept)])
        boundaries += kept
        boundaries += take_boundaries(
            request, shards, start, int(ends[row]), is_pending=bool(unread)
        )
    return boundaries


def find_reached(
    plan: StepPlan, outlook: Outlook, places: np.ndarray, shards: DataShards
) -> list[Boundary]:
    """Boundaries that requests stand at after plain steps, with a place each, to be written then.

    Args:
      plan: the call.
      outlook: what requests hold before it.
      places: as in `find_crossed`.
      shards: the same.
    """
    size = shards.managers[0].plan.block_tokens
    ends = outlook.lengths[places] + plan.rows.num_appended
    boundaries = []
    for row in np.flatnonzero(ends % size == 0).tolist():
        request, end = outlook.running.requests[places[row]], int(ends[row])
        boundaries += take_boundaries(request, shards, end - 1, end)
    return boundaries


def keep_written(flight: Flight, next_flight: Flight | None, shards: DataShards) -> int:
    """Snapshots that a step has written, for who comes after; others' places are free.

    A place that the next step may write too is left to it until the boundary is behind.

    Args:
      flight: the step, counted.
      next_flight: the step that was launched behind it, or None.
      shards: the cache's managers.

    Returns:
      How many are kept.
    """
    if not flight.boundaries:
        return 0
    following = next_flight.boundaries if next_flight is not None else []
    alive, num_kept = set(flight.slots.tolist()), 0
    for boundary in flight.boundaries:
        manager, own = shards.of(boundary.slot)
        is_alive = boundary.slot in alive
        if is_alive and boundary.end <= int(manager.length_tokens[own]):
            num_kept += manager.prefixes.keep_snapshot(own, *boundary[1:])
            if boundary in following:
                following.remove(boundary)
        elif boundary not in following:
            manager.prefixes.drop_snapshot(boundary.place)
    flight.boundaries = []
    return num_kept
