"""How sure a mean over rows of text is: bootstrap intervals, in NumPy alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, stdtrit

_DRAWS_AT_ONCE = 2**22
_FEW_ROWS = 8
"""Below so many rows percentiles of drawn means are too near."""


class Interval(NamedTuple):
    """A mean and the interval that it lies in; `low` and `high` are NaN for one row alone."""

    mean: float
    low: float
    high: float

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the mean differs from 0 by more than chance makes likely."""
        return self.low > 0 or self.high < 0


def mean_interval(
    values: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """The mean of rows, and a bootstrap interval of it.

    Rows are drawn again with replacement, and the interval is that of the means' percentiles. Those
    are too narrow for few rows, since a sample's spread is less than that of what it was drawn
    from; here they are as far out as Student's t is beside the normal distribution. No mean that is
    drawn lies beyond the rows themselves, so that of fewer than eight rows the interval is at least
    that of Student's t.

    Args:
      values: f64[n], one per row; rows are independent of each other.
      level: probability that the interval holds the mean of all rows there could be.
      resamples: how often rows are drawn again.
      seed: of the draws.

    Raises:
      ValueError: there is no row, a value is not finite, or the level is not between 0 and 1.

    Source: Hesterberg, What Teachers Should Know about the Bootstrap, 2015, section 4.2.
    """
    rows = np.asarray(values, np.float64)
    if rows.ndim != 1 or not rows.size or not np.all(np.isfinite(rows)):
        raise ValueError(f"values must be finite, one per row, got {rows.dtype}{list(rows.shape)}")
    if not 0 < level < 1:
        raise ValueError(f"level must be above 0 and below 1, got {level}")
    count, mean = rows.size, float(rows.mean())
    if count == 1:
        return Interval(mean, math.nan, math.nan)
    rng, means = np.random.default_rng(seed), []
    for done in range(0, resamples, size := max(1, _DRAWS_AT_ONCE // count)):
        draws = rng.integers(0, count, (min(size, resamples - done), count))
        means.append(rows[draws].mean(axis=1))
    quantile = stdtrit(count - 1, (1 - level) / 2)
    tail = float(ndtr(quantile * math.sqrt(count / (count - 1))))
    low, high = map(float, np.quantile(np.concatenate(means), [tail, 1 - tail]))
    if count < _FEW_ROWS:
        width = -float(quantile) * float(rows.std(ddof=1)) / math.sqrt(count)
        low, high = min(low, mean - width), max(high, mean + width)
    return Interval(mean, low, high)


def paired_difference(first: ArrayLike, second: ArrayLike, **options: Any) -> Interval:
    """The mean of `second - first` and its interval; row i of both is of the same text.

    Pairs leave out what makes one text harder than another, which is most of a loss's spread.

    Args:
      first: f64[n], one per row.
      second: f64[n].
      **options: as of `mean_interval`.

    Raises:
      ValueError: they have other shapes, or as of `mean_interval`.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape:
        raise ValueError(
            f"first and second must be of the same rows, got {first.shape=} and {second.shape=}"
        )
    return mean_interval(second - first, **options)
