"""Boundaries at which a step leaves snapshots, as the rows that it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4_jax.cache.snapshots import SnapshotPlan
from dsv4_jax.serving.schedule.snapshot_policy import Boundary


def snapshot_plan(
    boundaries: Sequence[Boundary], count: int, *, shards: int, slots: int
) -> SnapshotPlan:
    """Room for `count` boundaries on each of so many data shards, of so many slots each."""
    fields = np.full((3, shards * count), -1, np.int32)
    nexts = [shard * count for shard in range(shards)]
    for slot, end, place, _ in boundaries:
        shard, own = divmod(slot, slots)
        assert nexts[shard] < (shard + 1) * count, f"{boundaries} have room for {count} each"
        fields[:, nexts[shard]] = own, end, place
        nexts[shard] += 1
    return SnapshotPlan(rows=fields[0], ends=fields[1], places=fields[2])  # type: ignore[arg-type]
