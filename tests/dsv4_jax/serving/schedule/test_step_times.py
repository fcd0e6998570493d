"""StepTimes: from arithmetic to what was measured, whatever pauses lie between."""

import contextlib

import numpy as np
import pytest

from dsv4_jax.serving.schedule.call_load import CallLoad
from dsv4_jax.serving.schedule.scheduler import RowPlan, StepPlan, StepRows
from dsv4_jax.serving.schedule.step_times import TRUSTED, StepTimes
from dsv4_jax.step.call_cost import base_seconds, reach_seconds
from helpers.interrupts import Interrupt, Lines
from helpers.simulated_device import FLASH


def load(size, context=1000, tokens=None):
    tokens = size if tokens is None else tokens
    return CallLoad(size, tokens, float(tokens * context))


def by_arithmetic(one):
    return base_seconds(FLASH, one.tokens, one.size) + reach_seconds(FLASH, one.reach)


def test_a_load_is_what_rows_append_and_what_lies_before():
    rows = StepRows.of([RowPlan(2, 1, 3, True), RowPlan(0, 50, 0, False)])
    found = CallLoad.of(StepPlan(rows, 64, False, holds_prompts=True), np.array([700, 100]))
    assert found == CallLoad(64, 54, 4 * 702 + 50 * 125)


def test_arithmetic_is_the_first_guess():
    times = StepTimes(FLASH)
    assert times.predict(load(1024)) == pytest.approx(by_arithmetic(load(1024)))
    assert times.predict(load(1024, 100_000)) > times.predict(load(1024))


def test_what_was_measured_counts_and_pauses_do_not():
    times = StepTimes(FLASH)
    for _ in range(TRUSTED):
        times.learn(load(1024), 0.1)
    times.learn(load(1024), 9.0)  # the host was elsewhere
    times.learn(load(1024), 0.1)
    assert times.predict(load(1024)) == pytest.approx(0.1)
    for _ in range(5):
        times.learn(load(1024), 0.12)  # the card has become slower
    assert times.predict(load(1024)) == pytest.approx(0.12)


def test_sizes_and_contexts_that_were_not_measured_take_the_nearest():
    times = StepTimes(FLASH)
    for size, wrong in ((256, 3.0), (8192, 2.0)):
        for _ in range(TRUSTED):
            times.learn(load(size, 0), wrong * by_arithmetic(load(size, 0)))
    assert times.predict(load(512, 0)) == pytest.approx(3 * by_arithmetic(load(512, 0)))
    assert times.predict(load(4096, 0)) == pytest.approx(2 * by_arithmetic(load(4096, 0)))
    far = load(256, 500_000)
    by_context = reach_seconds(FLASH, far.reach)
    expected = 3 * base_seconds(FLASH, 256, 256) + by_context
    assert times.predict(far) == pytest.approx(expected)
    for _ in range(TRUSTED):
        times.learn(far, 1.0)
    assert times.predict(far) == pytest.approx(1.0)
    assert times.predict(load(256, 0)) == pytest.approx(3 * by_arithmetic(load(256, 0)))


def test_a_device_that_reads_contexts_faster_is_learned():
    """Half of what is counted for context alone is more than all that such a step takes."""
    times, far = StepTimes(FLASH), load(1024, 1_000_000)
    for share in (0.5, 0.9, 1.0, 1.1, 3.0):
        for _ in range(7):
            times.learn(far, share * by_arithmetic(far))
        assert times.predict(far) == pytest.approx(share * by_arithmetic(far))
        if share < 1:
            other = load(256, 2_000_000)
            assert times.predict(other) == pytest.approx(share * by_arithmetic(other))


def test_one_slow_launch_decides_nothing():
    """The first launch of a program may take long; what others say is believed beside it."""
    times = StepTimes(FLASH)
    for _ in range(TRUSTED):
        times.learn(load(256), by_arithmetic(load(256)))
    times.learn(load(1024), 1.0)
    assert times.predict(load(1024)) == pytest.approx(by_arithmetic(load(1024)), rel=0.01)
    for _ in range(TRUSTED - 1):
        times.learn(load(1024), 1.0)
    assert times.predict(load(1024)) == pytest.approx(1.0)
    times.doubt(load(1024))
    assert times.predict(load(1024)) == pytest.approx(by_arithmetic(load(1024)), rel=0.01)
    times.learn(load(1024), 1.0)
    times.learn(load(1024), 1.0)
    assert times.predict(load(1024)) == pytest.approx(1.0)


def test_a_device_that_is_a_thousand_times_slower_is_known_after_one_step():
    times = StepTimes(FLASH)
    times.learn(load(256), 1000 * by_arithmetic(load(256)))
    assert times.predict(load(256)) == pytest.approx(1000 * by_arithmetic(load(256)))
    assert times.predict(load(1024)) > 900 * base_seconds(FLASH, 1024, 1024)


def test_a_call_that_is_interrupted_at_any_line_has_learned_all_or_nothing():
    """A kind that was noted without its measurement would end each later step with an error."""
    calls = [
        lambda times: times.learn(load(1024), 0.1),
        lambda times: times.learn(load(256), 0.1),
        lambda times: times.learn(load(1024), 0.3),
        lambda times: times.doubt(load(1024)),
    ]

    def learn(lines):
        times = StepTimes(FLASH)
        found = [{size: times.predict(load(size)) for size in (256, 1024, 8192)}]
        for call in calls:
            with contextlib.suppress(Interrupt), lines.tracing("step"):
                call(times)
            found.append({size: times.predict(load(size)) for size in found[0]})
            if lines.raised:
                break
        return found

    counted = Lines()
    known = learn(counted)
    assert len(counted.counts) > 20
    for line, count in counted.counts.items():
        for time in range(1, count + 1):
            found = learn(Lines({line: time}))
            assert found[:-1] == known[: len(found) - 1]
            assert found[-1] in known[len(found) - 2 : len(found)], (line, time)
