"""Bootstrap intervals: they cover, are as wide as they must be, and refuse what is no row."""

import numpy as np
import pytest

from dsv4_jax.research import mean_interval, paired_difference

pytestmark = pytest.mark.unoptimised


def equal_ideas(rng, rows):
    """Losses of two ideas whose rows differ as much between texts, and by noise from each other."""
    texts = 1 + 0.3 * rng.standard_normal(rows)
    noise = 0.02 * rng.standard_t(4, (2, rows))  # a few rows differ by much
    return texts + noise


def share_that_leaves_out_zero(rows, **options):
    rng = np.random.default_rng(0)
    pairs = [equal_ideas(rng, rows) for _ in range(200)]
    options = {"resamples": 1000} | options
    return np.mean([paired_difference(a, b, **options).leaves_out_zero for a, b in pairs])


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 8, 41])
def test_of_two_equal_ideas_few_intervals_leave_nought_out(rows):
    assert 0.01 <= share_that_leaves_out_zero(rows) <= 0.08


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_an_interval_of_few_rows_reaches_beyond_them(rows):
    values = np.arange(1.0, rows + 1)
    mean, low, high = mean_interval(values)
    assert mean == values.mean()
    assert low < 1
    assert high > rows


def test_an_interval_that_is_too_narrow_would_show():
    assert share_that_leaves_out_zero(41, level=0.8) > 0.12


def test_pairs_see_what_single_losses_do_not():
    rng = np.random.default_rng(1)
    first, second = equal_ideas(rng, 30)
    second += 0.03
    assert paired_difference(first, second).leaves_out_zero
    one, other = mean_interval(first), mean_interval(second)
    assert one.high > other.low


def test_the_interval_is_that_of_the_normal_distribution_for_many_rows():
    values = np.random.default_rng(2).standard_normal(20_000)
    mean, low, high = mean_interval(values, resamples=2000)
    assert mean == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(1.96 / np.sqrt(20_000), rel=0.06)


def test_the_same_rows_give_the_same_interval_and_one_row_gives_none():
    assert mean_interval([1.0, 2.0, 4.0]) == mean_interval([1.0, 2.0, 4.0])
    assert np.isnan(mean_interval([3.0]).low)
    assert not mean_interval([3.0]).leaves_out_zero


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([]), "values must be finite, one per row"),
        (lambda: mean_interval([1.0, np.nan]), "values must be finite, one per row"),
        (lambda: mean_interval([[1.0]]), "values must be finite, one per row"),
        (lambda: mean_interval([1.0], level=95), "level must be above 0 and below 1, got 95"),
        (lambda: paired_difference([1.0], [1.0, 2.0]), "must be of the same rows"),
    ],
)
def test_what_is_no_row_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
