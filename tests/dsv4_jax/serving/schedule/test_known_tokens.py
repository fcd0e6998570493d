"""What running requests know lies in arrays over slots, and an undone change leaves it alone."""

import numpy as np

import dsv4_jax as ds
from dsv4_jax.serving.requests.calls import UndoLog
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.schedule.known_tokens import KnownTokens

NOW = 7.5


def make_request(request_id, prompt):
    sampling = ds.SamplingParams(max_new_tokens=4, stop_token_ids=())
    return Request(request_id, np.array(prompt, np.int32), sampling, 0.0)


def enter(known, request, slot, undo):
    undo.save(request)
    request.slot = slot
    known.enter(request, undo)


def leave(known, request, undo):
    undo.save(request)
    known.leave(request)
    request.slot = -1


def add(known, slots, drawn, count, undo):
    known.add(np.array(slots), np.array(drawn, np.int32), np.array(count), NOW, undo)


def test_requests_know_what_was_added_for_their_slots():
    known, undo = KnownTokens(3, 8), UndoLog()
    first, second = make_request(0, [1, 2]), make_request(1, [3])
    with undo:
        enter(known, first, 2, undo)
        enter(known, second, 0, undo)
        add(known, [0, 2], [[5], [6]], [1, 1], undo)
        add(known, [0, 2], [[7, 8], [9, -1]], [2, 1], undo)
    assert first.known.tolist() == [1, 2, 6, 9]
    assert second.known.tolist() == [3, 5, 7, 8]
    with undo:
        leave(known, first, undo)
        enter(known, make_request(2, [4, 4, 4, 4]), 2, undo)
    assert first.known.tolist() == [1, 2, 6, 9]
    assert (first.num_drawn, first.last_token_s) == (2, NOW)
    assert np.isnan(known.last_token_s[2])


def test_a_row_that_two_requests_had_in_one_change_is_undone():
    known, undo, old = KnownTokens(1, 8), UndoLog(), make_request(0, [1, 2])
    with undo:
        enter(known, old, 0, undo)
    new = make_request(1, [3, 4, 5])
    undo.__enter__()
    add(known, [0], [[6]], [1], undo)
    leave(known, old, undo)
    enter(known, new, 0, undo)
    add(known, [0], [[7]], [1], undo)
    for _ in range(2):  # the first one may be interrupted itself
        undo.roll_back()
        assert (old.known.tolist(), old.slot) == ([1, 2], 0)
        assert (new.known.tolist(), new.slot) == ([3, 4, 5], -1)
        known.leave(old)
        old.slot = -1
        assert old.known.tolist() == [1, 2]
