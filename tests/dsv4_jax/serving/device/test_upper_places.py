"""Places of the tokens that all layers run, of each data shard within its own part of a step."""

import numpy as np

from dsv4_jax.serving.device.upper_places import upper_places
from dsv4_jax.serving.schedule.scheduler import RowPlan, StepPlan, StepRows


def test_places_are_numbered_within_their_shard():
    rows = [RowPlan(0, 2, 1, True), RowPlan(1, 4, 0, False, rests=True), RowPlan(3, 1, 0, True)]
    rows += [RowPlan(4, 3, 0, False, rests=True), RowPlan(5, 2, 0, True)]
    places = np.array([0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20])  # the second shard's at 16
    plan = StepPlan(StepRows.of(rows), 16, False, upper_size=5)
    assert upper_places(plan, places, 2).tolist() == [0, 1, 2, 7, -1, 3, 4, -1, -1, -1]
    third = upper_places(plan, np.where(places > 15, places + 16, places), 3)
    assert third.tolist() == [0, 1, 2, 7, -1, *[-1] * 5, 3, 4, -1, -1, -1]


def test_where_all_layers_run_all_there_are_none():
    plan = StepPlan(StepRows.of([RowPlan(0, 2, 0, True)]), 16, False)
    assert upper_places(plan, np.arange(2), 1) is None
