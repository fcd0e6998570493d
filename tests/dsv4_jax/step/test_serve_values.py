"""What a step adds to the host's counts of drawn tokens."""

import collections

import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.step.draws import DrawnCounts
from dsv4_jax.step.serve_values import FIRST_DRAFT, LAST_DRAWN, ServeOutput, count_last, fed_rows
from helpers.arrays import on_device

ROWS = 4


def i32(values):
    return on_device(values, jnp.int32)


def totals(counts):
    """{(row, token): count}, without entries of nobody."""
    found = collections.Counter()
    for row, token, count in np.stack([counts.rows, counts.token_ids, counts.counts]).T.tolist():
        if row >= 0:
            found[row, token] += count
    return dict(found)


def test_what_the_step_before_drew_counts_where_the_host_has_not_read_it():
    """Row 0 is fed a kept draft and a token, row 1 is known, row 2 sits out, row 3 drew one."""
    step_input = ds.StepInput(
        token_ids=i32([LAST_DRAWN, FIRST_DRAFT, 9, LAST_DRAWN, LAST_DRAWN, 0]),
        request_ids=i32([0, 0, 1, 3, -1, -1]),
        request_slots=i32([0, 1, -1, 3]),
    )
    drawn = i32([[7, 5, -1], [9, -1, -1], [8, 8, -1], [5, -1, -1]])
    last = ServeOutput.of(drawn, jnp.ones(ROWS, jnp.int32), jnp.zeros((ROWS, 2), jnp.int32), None)
    counts = DrawnCounts(rows=i32([0, 1, -1]), token_ids=i32([5, 9, 3]), counts=i32([2, 1, 4]))
    found = totals(count_last(counts, fed_rows(step_input), last))
    assert found == {(0, 5): 3, (0, 7): 1, (1, 9): 1, (3, 5): 1}
    assert count_last(None, fed_rows(step_input), last) is None
    assert count_last(counts, fed_rows(step_input), None) is counts


def test_the_output_of_no_step_counts_for_nobody():
    step_input = ds.StepInput(
        token_ids=i32([4, 5]), request_ids=i32([0, 1]), request_slots=i32([0, 1])
    )
    counts = DrawnCounts(rows=i32([1]), token_ids=i32([5]), counts=i32([1]))
    last = ServeOutput.empty(2, 0, 96)
    assert totals(count_last(counts, fed_rows(step_input), last)) == {(1, 5): 1}
