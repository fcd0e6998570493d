"""Some tokens of a call, as a call of their own."""

import jax.numpy as jnp
import numpy as np

from dsv4_jax.model.some_rows import pick_call
from helpers.calls import make_call


def test_a_call_of_some_tokens_says_where_its_own_rows_begin():
    """Two tokens of the second of three rows; two places are padding, and belong to nobody."""
    call = make_call(
        np.zeros((3, 2)), [0, 0, 0, 1, 1, 2, -1],
        slots=[4, 4, 4, 5, 5, 6, -1], positions=[7, 8, 9, 20, 21, 3, 0],
        lengths=[7, 7, 7, 20, 20, 3, 0], row_slots=[4, 5, 6], row_lengths=[7, 20, 3],
        row_counts=[3, 2, 1], row_offsets=[0, 3, 5],
    )  # fmt: skip
    picked = pick_call(call, jnp.array([3, 4, -1, -1]))
    np.testing.assert_array_equal(picked.segment_ids, [1, 1, -1, -1])
    np.testing.assert_array_equal(picked.slots, [5, 5, -1, -1])
    np.testing.assert_array_equal(picked.positions, [20, 21, 0, 0])
    np.testing.assert_array_equal(picked.lengths, [20, 20, 0, 0])
    np.testing.assert_array_equal(picked.row_counts, [0, 2, 0])
    assert picked.row_offsets[1] == 0


def test_padding_belongs_to_nobody_where_the_first_token_is_somebodys():
    """Place -1 would read the first token of the call, which is the first row's."""
    call = make_call(np.zeros((2, 1)), [0, 1], row_counts=[1, 1], row_offsets=[0, 1])
    picked = pick_call(call, jnp.array([0, -1]))
    np.testing.assert_array_equal(picked.segment_ids, [0, -1])
    np.testing.assert_array_equal(picked.row_counts, [1, 0])
