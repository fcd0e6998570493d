"""Histogram: how many values fell between which bounds."""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np

from dsv4_jax import checks

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histograms, in seconds."""

FINE_SECONDS = tuple(
    sorted({*SECONDS, 0.002, 0.005, 0.007, 0.015, 0.02, 0.04, 0.05, 0.06, 0.08, 0.15, 0.2, 0.5})
)
"""Those of times of steps, between which half a step counts."""


@dataclasses.dataclass
class Histogram:
    """Counts of values by size.

    Attributes:
      bounds: upper bounds, ascending; a last bucket takes what is above.
      counts: values in each bucket.
      total: sum of all values.
      least: the smallest value that was added.
      most: the largest one.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = dataclasses.field(default_factory=list)
    total: float = 0.0
    least: float = dataclasses.field(init=False)
    most: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """One bucket more than bounds."""
        given, least = self.bounds, -checks.FLOAT32_MAX
        bounds = checks.sequence("bounds", given, of="numbers", limit=1000)
        self.bounds = tuple(checks.number("bounds", one, least) for one in bounds)
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)):
            checks.refuse("bounds", "ascending numbers", given)
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        # Attributes of its own from the start, so that a change which is taken back leaves none.
        self.least, self.most = math.inf, -math.inf
        if self.count:
            self.least, self.most = min(0.0, self.bounds[0]), self.bounds[-1]

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Counts a value; `counts` is a new list then."""
        value = checks.number("value", value, -checks.FLOAT32_MAX)
        counts = list(self.counts)
        counts[bisect.bisect_left(self.bounds, value)] += 1
        self.counts = counts
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)

    def quantile(self, share: float) -> float:
        """An estimate of the value that this share of values is at or below.

        The bucket of that value is known, and its place there is not: values are taken to lie
        evenly between the bucket's bounds, and within `least` and `most`.

        Args:
          share: 0 to 1.

        Returns:
          The estimate; NaN before any value.

        Raises:
          ValueError: the share is out of range.
        """
        rank, seen = checks.number("share", share, 0, 1, rule="0 to 1") * self.count, 0
        lows, highs = (-math.inf, *self.bounds), (*self.bounds, math.inf)
        for low, high, count in zip(lows, highs, self.counts, strict=True):
            if count and seen + count >= rank:
                low, high = max(low, self.least), min(high, self.most)
                return low + (high - low) * (rank - seen) / count
            seen += count
        return math.nan


def add_values(histogram: Histogram, values: np.ndarray, times: np.ndarray) -> None:
    """`Histogram.add` of finite values f64[n], each so many times i64[n], at least once."""
    if not len(values):
        return
    places = np.searchsorted(np.array(histogram.bounds), values)
    added = np.bincount(places, weights=times, minlength=len(histogram.counts)).tolist()
    histogram.counts = [old + int(n) for old, n in zip(histogram.counts, added, strict=True)]
    histogram.total += float(values @ times)
    histogram.least = min(histogram.least, float(values.min()))
    histogram.most = max(histogram.most, float(values.max()))
