"""`CallIndices` for ops that look at few of its arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers.arrays import on_device
from pallas_kernels import CallIndices

PER_TOKEN = ("segment_ids", "slots", "positions", "lengths")
PER_ROW = ("row_slots", "row_lengths", "row_counts", "row_offsets")


def make_call(block_table, segment_ids, *, visible=None, **per_token):
    """A call of those arrays; tokens lie where `per_token` says, or in slot -1 at position 0."""
    num_tokens, num_rows = len(segment_ids), len(block_table)
    nowhere = {"slots": np.full(num_tokens, -1)}
    nowhere |= {name: np.zeros(num_tokens) for name in ("positions", "lengths")}
    rows = {name: np.zeros(num_rows) for name in PER_ROW} | {"row_slots": np.full(num_rows, -1)}
    given = {"segment_ids": segment_ids, "block_table": block_table}
    arrays = nowhere | rows | per_token | given
    return CallIndices(
        **{name: on_device(array, jnp.int32) for name, array in arrays.items()},
        visible=None if visible is None else on_device(visible, jnp.int32),
        max_row_tokens=max(1, num_tokens),
    )


def call_specs(num_tokens, table_width, *, num_rows=None, has_visible=True):
    """A call whose arrays are `jax.ShapeDtypeStruct`; by default each token is of its own row."""
    num_rows = num_rows or num_tokens

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return CallIndices(
        **dict.fromkeys(PER_TOKEN, i32(num_tokens)),
        **dict.fromkeys(PER_ROW, i32(num_rows)),
        block_table=i32(num_rows, table_width),
        visible=i32(num_tokens) if has_visible else None,
        max_row_tokens=max(1, num_tokens // num_rows),
    )


def four_tokens(block_table):
    """Two tokens of one request, and one each of two; every window is full."""

    def i32(values):
        return on_device(values, jnp.int32)

    return CallIndices(
        segment_ids=i32([0, 0, 1, 2]),
        slots=i32([3, 3, 1, 4]),
        positions=i32([9, 10, 7, 12]),
        lengths=i32([9, 9, 7, 12]),
        row_slots=i32([3, 1, 4]),
        row_lengths=i32([9, 7, 12]),
        row_counts=i32([2, 1, 1]),
        row_offsets=i32([0, 2, 3]),
        block_table=i32(block_table),
        visible=i32([4, 4, 4, 4]),
        max_row_tokens=2,
    )
