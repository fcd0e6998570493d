"""What one of many calls in a row takes, of a device whose times are made up."""

import pytest

from dsv4_jax.bench import timing

HOST_S, DEVICE_S = 0.01, 0.02


@pytest.fixture
def rows_of_calls(monkeypatch):
    """Numbers of calls in a row; each row begins when the host has handed the first one over."""
    made = []

    def dispatch(call, state, times):
        made.append(times)
        for _ in range(times):
            state = call(state)
        return HOST_S + DEVICE_S * times, state

    monkeypatch.setattr(timing, "dispatch", dispatch)
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    return made


def test_the_host_counts_only_where_it_is_slower(rows_of_calls):
    found, state = timing.time_calls(lambda state: state + 1, 0, rewind=lambda state: 0)
    for seconds in (found.median_s, found.least_s, found.most_s):
        assert seconds == pytest.approx(DEVICE_S)
    assert found.calls == 6  # the fewest that take 0.15 s, by two calls of 0.05 s
    assert rows_of_calls == [1, 1, 2, *[6, 12] * 7]
    assert state == 12


def test_a_pause_in_the_shorter_row_makes_no_call_shorter(rows_of_calls, monkeypatch):
    regular, pauses = timing.dispatch, [0.0, 0.0, 0.0, 0.0, 0.0, 0.04]

    def dispatch(call, state, times):
        seconds, state = regular(call, state, times)
        return seconds + (pauses.pop() if times == 6 and pauses else 0), state

    monkeypatch.setattr(timing, "dispatch", dispatch)
    found, _ = timing.time_calls(lambda state: state + 1, 0, rewind=lambda state: 0)
    assert found.least_s == pytest.approx(DEVICE_S)


def test_no_row_is_longer_than_there_is_room_for(rows_of_calls):
    found, _ = timing.time_calls(lambda state: state, 0, max_calls=7, repeats=2)
    assert found.calls == 3
    assert max(rows_of_calls) == 6


def test_a_single_call_is_timed_from_its_beginning(rows_of_calls):
    found, _ = timing.time_calls(lambda state: state, 0, max_calls=1, repeats=3)
    assert found.median_s == pytest.approx(HOST_S + DEVICE_S)
    assert rows_of_calls == [1] * 5


def test_who_has_made_the_first_calls_says_so(rows_of_calls):
    timing.time_calls(lambda state: state, 0, max_calls=1, repeats=3, first_calls=0)
    assert rows_of_calls == [1] * 3


def test_time_runs_out(rows_of_calls):
    timing.time_calls(lambda state: state, 0, limit_s=0)
    assert rows_of_calls == [1, 1, 2, 6, 12]  # there is always one measurement


def test_a_cpu_has_no_host_beside_it(rows_of_calls, monkeypatch):
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "cpu")
    found, _ = timing.time_calls(lambda state: state, 0, max_calls=5, repeats=2)
    assert found.median_s == pytest.approx(HOST_S / 5 + DEVICE_S)
    assert rows_of_calls == [1, 1, 2, 5, 5]


def test_on_a_cpu_one_call_ends_before_the_next_begins(monkeypatch):
    """Programs of a mesh would wait in each other's collectives."""
    waited = []

    def wait(state):
        waited.append(state)
        return state

    monkeypatch.setattr(timing.jax, "block_until_ready", wait)
    timing.dispatch(lambda state: state + 1, 0, 3)
    assert waited == [0, 1, 2, 3, 3]


def test_programs_are_timed_in_turns(monkeypatch):
    """The clock slows down from call to call, which concerns both; neither always goes first."""
    order, clock = [], iter(range(1000))

    def dispatch(call, state, times):
        speed = 1 + next(clock) / 1000
        order.append(state)
        return HOST_S + (3 if state == "ours" else 2) * DEVICE_S * speed * times, state

    monkeypatch.setattr(timing, "dispatch", dispatch)
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    ours, others = (timing.Calls(None, who, lambda state: state, 12) for who in ("ours", "others"))
    found = timing.time_ratio(ours, others, least_pairs=4, limit_s=0)
    assert found.pairs == 4
    assert found.least <= found.median <= found.most
    assert found.median == pytest.approx(1.5, rel=0.01)
    measured = order[4:]  # after two calls of each
    assert (
        measured == ["others"] * 2 + ["ours"] * 4 + ["others"] * 4 + ["ours"] * 4 + ["others"] * 2
    )


def test_process_0_says_how_often_all_measure(monkeypatch):
    """Else one would wait in the collectives of a call that another never makes."""
    said = iter([True, True, False])
    monkeypatch.setattr(timing, "agree", lambda value: next(said))
    assert timing.repeat(lambda: "found", most=9, limit_s=0) == ["found"] * 2
