"""Pace: which size a step has, by its rules, and which measurements it believes."""

import types

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.schedule import pace as pace_module
from dsv4_jax.serving.schedule.call_load import CallLoad
from dsv4_jax.serving.schedule.pace import Pace
from dsv4_jax.serving.schedule.scheduler import RowNeed, RowPlan, StepRows, plan_shards
from dsv4_jax.serving.step_sizes import StepSizes
from helpers.simulated_device import FLASH

SIZES = (64, 256, 1024, 8192)
HELD = np.zeros(64, np.int32)


def make(max_step_ms, sizes=SIZES, *, is_given=True):
    options = types.SimpleNamespace(max_step_ms=max_step_ms if is_given else None)
    plan = types.SimpleNamespace(
        options=options,
        cost=FLASH,
        max_step_s=max_step_ms / 1e3,
        step_sizes=StepSizes(prompts=sizes, decoding=(1, 8, 64), is_plain=True),
        pools=types.SimpleNamespace(max_requests=64),
        mesh=None,
        upper=None,
    )
    return Pace(plan, Metrics())


def needs_of(*pending):
    return [[RowNeed(slot, each, 0) for slot, each in enumerate(pending)]]


def chosen(pace, *pending):
    return pace.choose(needs_of(*pending), HELD)


def tokens(plan):
    return {row.slot: row.num_tokens for row in plan.rows}


@pytest.mark.parametrize(("max_step_ms", "size"), [(30, 64), (50, 256), (80, 1024), (6e5, 8192)])
def test_beside_decoding_a_step_is_the_largest_that_fits(max_step_ms, size):
    plan = chosen(make(max_step_ms), 1, 1, 30_000)
    assert (plan.size, tokens(plan)) == (size, {0: 1, 1: 1, 2: size - 2})


def test_a_prompt_that_fits_takes_no_larger_step_than_it_needs():
    assert chosen(make(80), 1, 100).size == 256
    assert chosen(make(6e5), 1, 100).size == 256


def test_a_shape_that_would_be_half_empty_gives_way_to_smaller_ones():
    plan = chosen(make(80), 1, 278)
    assert (plan.size, tokens(plan)) == (256, {0: 1, 1: 255})
    assert chosen(make(80), 1, 23).size == 64  # the rest
    assert chosen(make(80), 1, 200).size == 256
    assert chosen(make(80), 100).size == 256  # alone, and not 64 and 64
    assert chosen(make(80), 1, 900).size == 1024
    assert chosen(make(80), 1100).size == 1024  # alone
    assert chosen(make(80), 7000).size == 8192
    assert chosen(make(80), *[1] * 40, 30).size == 256  # 64 leave too little to prompts
    for pending in ((1, 300), (1, 900), (1100,)):
        assert chosen(make(np.inf), *pending).size >= sum(pending)  # without a bound


def test_drafts_are_no_tokens_of_prompts():
    """64 tokens leave out the drafts that 256 check, and read 37 tokens of 40 in half the time."""
    needs = [[*(RowNeed(slot, 1, 5) for slot in range(27)), RowNeed(27, 40, 0)]]
    plan = make(80).choose(needs, HELD)
    assert (plan.size, tokens(plan)[27]) == (64, 37)


@pytest.mark.parametrize("pending", [100, 300, 450, 1100, 3000, 9000])
def test_a_request_without_company_has_the_same_shapes_whatever_steps_took(pending):
    sizes = set()
    for slow in (1, 30, 1000):  # times as long as the other sizes
        pace = make(80)
        for size in SIZES:
            for _ in range(3):
                seconds = pace.times.by_arithmetic(CallLoad(size, size, 0.0))
                pace.times.learn(CallLoad(size, size, 0.0), seconds * (slow if size > 64 else 1))
        sizes.add(chosen(pace, pending).size)
    assert len(sizes) == 1


def test_half_of_a_step_is_left_to_prompts_however_long_it_takes():
    plan = chosen(make(1), *[1] * 33, 5000)
    assert plan.size == 256
    assert tokens(plan)[33] == 256 - 33
    assert chosen(make(1), *[1] * 32, 5000).size == 64
    assert chosen(make(1, (64,)), *[1] * 60, 5000).size == 64


def test_alone_prompts_take_the_largest_step():
    assert chosen(make(80), 30_000).size == 8192
    assert chosen(make(80), *[8192] * 32).size == 8192
    assert chosen(make(80), *[500] * 40).size == 8192


def test_a_short_prompt_does_not_wait_for_a_step_of_long_ones():
    plan = chosen(make(80), *[32_768] * 4, 200)
    assert (plan.size, tokens(plan)) == (1024, {0: 512, 1: 312, 4: 200})
    assert chosen(make(6e5), *[32_768] * 4, 200).size == 8192
    assert chosen(make(80), *[32_768] * 4, 600).size == 8192  # it would not end in 1,024


def test_a_data_shard_that_decodes_bounds_the_step_of_all():
    needs = [[RowNeed(0, 30_000, 0)], [RowNeed(64, 1, 0)]]
    assert make(80).choose(needs, np.zeros(128, np.int32)).size == 1024
    needs = [[RowNeed(0, 200, 0)], [RowNeed(64, 1, 0), RowNeed(65, 150, 0)]]
    assert make(80).choose(needs, np.zeros(128, np.int32)).size == 256


def test_with_one_size_or_without_a_bound_times_decide_nothing():
    for pace in (make(1, (1024,)), make(np.inf)):
        for pending in ((1, 5000), (5000, 20), (1, 1, 7, 9000)):
            needs = needs_of(*pending)
            expected = plan_shards(needs, sizes=pace.sizes)
            for seconds in (1e-6, 1e3):
                plan = pace.choose(needs, HELD)
                assert (plan.size, tokens(plan)) == (expected.size, tokens(expected))
                pace.times.learn(CallLoad.of(plan, HELD[plan.rows.slots]), seconds)


def test_measured_times_decide():
    pace = make(80)
    load = CallLoad(1024, 1024, 0.0)
    for _ in range(3):
        pace.times.learn(load, 0.095)
    assert chosen(pace, 1, 30_000).size == 256
    for _ in range(5):
        pace.times.learn(load, 0.07)
    assert chosen(pace, 1, 30_000).size == 1024


def test_a_size_that_misses_its_bound_by_little_is_filled_less():
    """By what was measured, or since what lies before its tokens has grown."""
    pace = make(80)
    for _ in range(3):
        pace.times.learn(CallLoad(1024, 1024, 0.0), 0.0829)
    for lengths in (HELD, HELD + 40_000):
        plan = pace.choose(needs_of(1, 1, 30_000), lengths)
        load = CallLoad.of(plan, lengths[plan.rows.slots])
        assert plan.size == 1024
        assert 256 < load.tokens < 1024
        assert 0.077 < pace.times.predict(load) <= 0.080
        assert tokens(plan) == {0: 1, 1: 1, 2: load.tokens - 2}


def test_a_size_that_nearly_fits_is_tried_again(monkeypatch):
    monkeypatch.setattr(pace_module, "_RETRIED_AFTER", 10)
    pace = make(80)
    for size, seconds in ((1024, 0.095), (8192, 0.4)):
        for _ in range(3):
            pace.times.learn(CallLoad(size, size, 0.0), seconds)
    sizes = [chosen(pace, 1, 30_000).size for _ in range(12)]
    assert sizes == [256] * 9 + [1024] * 3
    for _ in range(2):
        pace.times.learn(CallLoad(1024, 1024, 0.0), 0.095)
    assert chosen(pace, 1, 30_000).size == 256


def test_a_size_that_was_slow_for_a_while_is_tried_again(monkeypatch):
    """Of a device that is as fast as before, and of one on which that size stays slow."""
    monkeypatch.setattr(pace_module, "_RETRIED_AFTER", 10)
    pace = make(80)
    for _ in range(7):
        pace.times.learn(CallLoad(1024, 1024, 0.0), 0.3)
        pace.times.learn(CallLoad(256, 256, 0.0), 0.035)
        pace.times.learn(CallLoad(8192, 8192, 0.0), 0.4)

    def runs(seconds):
        """How many steps of 256 there are before those of 1,024, which take so long."""
        sizes = []
        while len(sizes) < 100:
            sizes.append(chosen(pace, 1, 30_000).size)
            if sizes[-1] == 1024:
                pace.times.learn(CallLoad(1024, 1024, 0.0), seconds)
        return sizes

    assert runs(0.3) == [256] * 9 + [1024] * 2 + [256] * 19 + [1024] * 2 + [256] * 39 + (
        [1024] * 2 + [256] * 27
    )
    assert runs(0.07) == [256] * (79 - 27) + [1024] * 48
    for _ in range(7):
        pace.times.learn(CallLoad(1024, 1024, 0.0), 0.3)
    assert runs(0.07) == [256] * 9 + [1024] * 91  # it was not in vain


def test_only_long_steps_wait_for_the_one_before():
    pace, plan = make(80), chosen(make(80), 1, 30_000)
    assert not pace.waits(plan, CallLoad(1024, 1024, 0.0))
    assert pace.waits(plan, CallLoad(8192, 8192, 0.0))
    assert not make(np.inf).waits(plan, CallLoad(8192, 8192, 1e12))


def flight(launched_s, read_s, load=CallLoad(256, 256, 0.0), num_steps=1):  # noqa: B008
    plan, rows = types.SimpleNamespace(num_steps=num_steps), StepRows.of([RowPlan(0, 1, 0, True)])
    return types.SimpleNamespace(
        launched_s=launched_s, read_s=read_s, load=load, plan=plan, rows=rows
    )


def learned(pace):
    return pace._metrics.prompt_step_s.total


def test_a_step_lasts_from_its_launch_or_the_end_of_the_one_before():
    pace = make(80)
    pace.learn(flight(1.0, 1.5), waited_from_s=1.1)
    assert learned(pace) == pytest.approx(0.5)
    pace.learn(flight(1.2, 1.7), waited_from_s=1.55)  # launched behind, and began at 1.5
    assert learned(pace) == pytest.approx(0.7)
    pace.learn(flight(1.6, 1.8, None), waited_from_s=1.71)  # it only decodes
    pace.learn(flight(1.75, 2.1), waited_from_s=1.81)
    assert learned(pace) == pytest.approx(1.0)
    assert pace._metrics.prompt_step_s.count == pace._metrics.predicted_s.count == 3


def test_a_bound_that_is_not_given_is_five_decode_steps_where_these_are_longer():
    for is_given, num_steps, expected in ((False, 1, 0.2), (True, 1, 0.08), (False, 2, 0.1)):
        pace = make(80, is_given=is_given)
        assert pace.bound_s(1) == 0.08
        for start in range(3):
            pace.learn(flight(start, start + 0.04, None, num_steps), waited_from_s=start + 0.01)
        pace.learn(flight(5, 9, None), waited_from_s=8.99)  # the caller was away
        assert pace.bound_s(1) == pytest.approx(expected)
        assert pace.bound_s(2) == 0.08  # nothing is known of so many
    pace = make(80, is_given=False)
    pace.learn(flight(0, 0.01, None), waited_from_s=0.001)
    assert pace.bound_s(1) == 0.08
    assert make(np.inf, is_given=False).bound_s(1) == np.inf


def test_prompts_sit_out_for_the_time_of_a_decode_step_that_was_not_seen():
    pace = make(80, is_given=False)
    plan = chosen(pace, 1, 30_000)
    assert (plan.is_plain, tokens(plan)) == (True, {0: 1})
    pace.learn(flight(0, 0.01, None), waited_from_s=0.001)
    assert [chosen(pace, 1, 30_000).size for _ in range(2)] == [1024, 1024]
    plans = [chosen(pace, 1, 1, 30_000) for _ in range(5)]  # and never learns of two
    assert [plan.is_plain for plan in plans] == [True] * 3 + [False] * 2
    assert not chosen(pace, 1, 1, 1, 1, 60).is_plain  # it fits in any case
    assert not chosen(make(80), 1, 30_000).is_plain  # a bound that is given


def test_an_end_that_the_host_did_not_wait_for_teaches_nothing():
    pace = make(80)
    pace.learn(flight(1.0, 5.0), waited_from_s=4.99)  # the caller was away
    pace.learn(flight(1.1, 5.5), waited_from_s=5.01)  # it began nobody knows when
    assert learned(pace) == 0
    pace.learn(flight(5.1, 6.0), waited_from_s=5.51)
    assert learned(pace) == pytest.approx(0.5)


def test_a_step_beside_which_something_was_compiled_teaches_nothing(monkeypatch):
    counts = iter([7, 8, 8])
    monkeypatch.setattr(pace_module, "count_compiles", lambda: next(counts))
    pace = make(80)
    pace.learn(flight(1.0, 31.0), waited_from_s=20.0)
    assert learned(pace) == 0
    pace.learn(flight(31.0, 31.5), waited_from_s=31.1)
    assert learned(pace) == pytest.approx(0.5)


@settings(max_examples=200, deadline=None)
@example([1, 1, 1, 1235, 42], 83.0, {8192: 0.109375, 64: 1.0, 256: 1.0})  # 1,248 of 8,192 filled
@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=32),
    st.floats(1, 1000),
    st.dictionaries(st.sampled_from(SIZES), st.floats(1e-3, 1e3), max_size=4),
)
def test_whatever_was_measured_all_that_decode_and_the_oldest_prompt_go_on(
    pending, max_step_ms, measured
):
    pace = make(max_step_ms)
    for size, seconds in measured.items():
        for _ in range(3):
            pace.times.learn(CallLoad(size, size, 0.0), seconds)
    plan = chosen(pace, *pending)
    rows = tokens(plan)
    assert all(rows.get(slot) == 1 for slot, each in enumerate(pending) if each == 1)
    assert sum(rows.values()) <= plan.size
    prompts = [slot for slot, each in enumerate(pending) if each > 1]
    if prompts:
        oldest, read = prompts[0], sum(rows.get(slot, 0) for slot in prompts)
        assert read >= min(sum(pending[slot] for slot in prompts), plan.size - 32, 32)
        assert rows[oldest] >= min(pending[oldest], read // 2)
