"""The indices of a call: what follows from its input and the lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dsv4_jax as ds
from dsv4_jax.cache.step_input import check_step_input, index_call
from helpers.schedules import step_input
from pallas_kernels.common.call import CallIndices

pytestmark = pytest.mark.unoptimised

T, B, NUM_SLOTS, BLOCK_TOKENS = 14, 4, 6, 8
TABLE = np.array([[3, 9], [0, -1], [7, 1], [-1, -1], [5, 2], [4, 6]], np.int32)
CONTEXT = TABLE.shape[1] * BLOCK_TOKENS
TOKEN_FIELDS = ("segment_ids", "slots", "positions", "lengths")
ROW_FIELDS = ("row_slots", "row_lengths", "row_counts", "row_offsets", "block_table")

jit_index = jax.jit(functools.partial(index_call, block_tokens=BLOCK_TOKENS, max_row_tokens=T))
jit_closing = jax.jit(CallIndices.closing_tokens, static_argnames="compression_ratio")
jit_keep = jax.jit(CallIndices.keep)


def index(lengths, call):
    return jit_index(np.asarray(lengths, np.int32), TABLE, call)


def expected_indices(lengths, call):
    """Token by token."""
    request_ids, row_slots = np.asarray(call.request_ids), np.asarray(call.request_slots)
    want = {name: np.full(T, -1) for name in ("segment_ids", "slots")}
    want |= {name: np.zeros(T, int) for name in ("positions", "lengths")}
    want |= {name: np.zeros(B, int) for name in ("row_lengths", "row_counts", "row_offsets")}
    want |= {"row_slots": row_slots, "block_table": np.full((B, 2), -1)}
    for row, slot in enumerate(row_slots):
        if slot >= 0:
            want["row_lengths"][row] = lengths[slot]
            want["block_table"][row] = TABLE[slot]
    for t, row in enumerate(request_ids):
        if row < 0 or row_slots[row] < 0:
            continue
        length, place = want["row_lengths"][row], want["row_counts"][row]
        if not place:
            want["row_offsets"][row] = t
        if length + place < CONTEXT:
            want["segment_ids"][t], want["slots"][t] = row, row_slots[row]
            want["positions"][t], want["lengths"][t] = length + place, length
            want["row_counts"][row] += 1
    return want


@st.composite
def calls(draw):
    """Lengths, and a ragged call: rows in any order, padding between them, some rows idle."""
    lengths = draw(st.lists(st.integers(0, CONTEXT), min_size=NUM_SLOTS, max_size=NUM_SLOTS))
    slots = np.array(draw(st.permutations(range(NUM_SLOTS)))[:B])
    slots[draw(st.lists(st.booleans(), min_size=B, max_size=B))] = -1
    request_ids = []
    for row in draw(st.permutations(range(B))):
        room = T - len(request_ids)
        request_ids += [-1] * draw(st.integers(0, room // 4))
        request_ids += [row] * draw(st.integers(0, T - len(request_ids)))
    request_ids += [-1] * (T - len(request_ids))
    call = ds.StepInput(
        token_ids=np.zeros(T, np.int32),
        request_ids=np.asarray(request_ids, np.int32),
        request_slots=np.asarray(slots, np.int32),
    )
    return lengths, call


def ragged(slots, counts):
    """A call without padding between its rows."""
    return step_input([[1] * n for n in counts], range(B), slots, num_tokens=T)


@settings(deadline=None)
@given(case=calls())
@example(case=([0] * NUM_SLOTS, ragged([0, 1, 2, 4], [0, 0, 0, 0])))  # padding alone
@example(case=([0] * NUM_SLOTS, ragged([-1] * B, [5, 4, 3, 2])))  # idle rows alone
@example(case=([CONTEXT - 2] * NUM_SLOTS, ragged([5, 1, 2, 4], [3, 2, 1, 8])))  # past the context
def test_every_index_is_what_counting_gives(case):
    lengths, call = case
    indices = index(lengths, call)
    want = expected_indices(lengths, call)
    for name in (*TOKEN_FIELDS, *ROW_FIELDS):
        got = np.asarray(getattr(indices, name))
        assert got.dtype == np.int32, name
        # A row without tokens has no first one.
        told = want["row_counts"] > 0 if name == "row_offsets" else slice(None)
        np.testing.assert_array_equal(got[told], want[name][told], err_msg=name)


def test_tokens_beyond_the_context_become_padding():
    """They write nothing and are not counted; those before them stay."""
    lengths = [0, 0, CONTEXT - 3, 0, CONTEXT, 0]
    indices = index(lengths, ragged([2, 4, 0, 1], [5, 2, 1, 1]))
    np.testing.assert_array_equal(indices.positions[:5], [13, 14, 15, 0, 0])
    np.testing.assert_array_equal(indices.segment_ids[:9], [0, 0, 0, -1, -1, -1, -1, 2, 3])
    np.testing.assert_array_equal(indices.row_counts, [3, 0, 1, 1])


def test_a_slot_that_does_not_exist_is_idle():
    indices = index([3] * NUM_SLOTS, ragged([NUM_SLOTS, -1, 0, 1], [2, 2, 2, 2]))
    np.testing.assert_array_equal(indices.row_slots, [-1, -1, 0, 1])
    np.testing.assert_array_equal(indices.slots[:8], [-1] * 4 + [0, 0, 1, 1])
    np.testing.assert_array_equal(indices.block_table[:2], -1)


@settings(deadline=None)
@given(case=calls(), compression_ratio=st.sampled_from([1, 2, 3, 4, 16, 20]))
# Every row starts with its window's last token: 6 windows of 5 close, the most there can be.
@example(case=([4] * NUM_SLOTS, ragged([0, 1, 2, 4], [6, 6, 1, 1])), compression_ratio=5)
@example(case=([3, 7, 11, 0, 15, 0], ragged([0, 1, 2, 4], [1, 1, 1, 1])), compression_ratio=4)
def test_every_closing_token_is_found_in_order(case, compression_ratio):
    """n = min(T, T // compression_ratio + B) places are always enough."""
    lengths, call = case
    indices = index(lengths, call)
    closing = np.asarray(jit_closing(indices, compression_ratio=compression_ratio))
    assert closing.shape == (min(T, T // compression_ratio + B),)
    live = np.asarray(indices.segment_ids) >= 0
    (expected,) = np.nonzero(live & ((np.asarray(indices.positions) + 1) % compression_ratio == 0))
    np.testing.assert_array_equal(closing[: len(expected)], expected)
    assert np.all(closing[len(expected) :] == -1)


def test_a_row_may_close_several_windows():
    indices = index([2, 0, 0, 0, 0, 0], ragged([0, -1, -1, -1], [14, 0, 0, 0]))
    closing = jit_closing(indices, compression_ratio=4)
    np.testing.assert_array_equal(closing, [1, 5, 9, 13, -1, -1, -1])


@settings(deadline=None)
@given(
    case=calls(), num_tokens=st.lists(st.integers(-1, T), min_size=B, max_size=B).map(np.asarray)
)
def test_keep_leaves_the_first_tokens_of_each_row(case, num_tokens):
    lengths, call = case
    indices = index(lengths, call)
    kept = jit_keep(indices, num_tokens.astype(np.int32))
    counts = np.clip(num_tokens, 0, indices.row_counts)
    np.testing.assert_array_equal(kept.row_counts, counts)
    row = np.asarray(indices.segment_ids)
    place = np.asarray(indices.positions) - np.asarray(indices.lengths)
    stays = (row >= 0) & (place < counts[row])
    np.testing.assert_array_equal(kept.segment_ids, np.where(stays, row, -1))
    np.testing.assert_array_equal(kept.slots, np.where(stays, indices.slots, -1))
    for name in set(TOKEN_FIELDS + ROW_FIELDS) - {"segment_ids", "slots", "row_counts"}:
        np.testing.assert_array_equal(getattr(kept, name), getattr(indices, name))


ROW, SLOTS = np.zeros(3, np.int32), np.arange(3, dtype=np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ROW[None]}, r"token_ids must be i32 of rank 1, got int32\[1, 3\]"),
        ({"request_ids": ROW.astype(np.float32)}, "request_ids must be i32 .* got float32"),
        ({"request_slots": ROW.astype(np.uint8)}, "request_slots must be i32 .* got uint8"),
        ({"request_ids": ROW[:2]}, "token_ids and request_ids must agree on T"),
        ({"token_ids": ROW[:0], "request_ids": ROW[:0]}, "at least one token and one row"),
        ({"request_slots": ROW[:0]}, "at least one token and one row"),
        ({"request_ids": ROW + 3}, r"request_ids must be in -1\.\.2, got 3"),
        ({"request_ids": ROW - 2}, r"request_ids must be in -1\.\.2, got -2"),
        ({"token_ids": ROW + 96}, r"token_ids must be in 0\.\.95, got 96"),
        ({"token_ids": ROW - 1}, r"token_ids must be in 0\.\.95, got -1"),
        ({"request_slots": SLOTS + 2}, r"request_slots must be in -1\.\.3, got 4"),
        ({"request_slots": ROW}, "request_slots must hold no slot twice"),
        ({"request_ids": SLOTS % 2}, "request_ids must keep each row's tokens next to each other"),
        ({"request_ids": -(SLOTS % 2)}, "must keep each row's tokens next to each other"),
    ],
)
def test_errors_name_the_field(changes, message):
    fields = {"token_ids": ROW, "request_ids": ROW, "request_slots": SLOTS} | changes
    call = ds.StepInput(**{name: jnp.asarray(array) for name, array in fields.items()})
    with pytest.raises(ValueError, match=message):
        check_step_input(call, vocab_size=96, num_slots=4)


def test_values_are_not_looked_at_inside_jit():
    call = ds.StepInput(
        token_ids=jnp.asarray(ROW + 96), request_ids=jnp.asarray(ROW), request_slots=ROW
    )
    jax.jit(lambda call: check_step_input(call, vocab_size=96, num_slots=1))(call)
