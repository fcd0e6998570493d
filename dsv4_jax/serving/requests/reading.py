"""Which tokens of a request all layers read, and which the lower ones alone.

Somebody goes on from a place where the rings of all layers have to be what they should be: the
request itself behind its known tokens, samples that fork before the last of them, who comes back to
its last block boundary, and who leaves a prefix where this request left it. Before each of these
the upper layers run for `look_back` tokens (`config/upper_layers.py`), and for all that follow the
last. In between they rest.

    known tokens        |........................|.......o......|..........o.....x
                        start            o: boundaries that are needed, x: the last token
    all layers                    ----------              ----------------
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterable

_ROWS_BESIDE = 256
"""Rows that take about as long as what a step takes whatever its rows are."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a request is read.

    Attributes:
      spans: positions that all layers run, from one up to another, ascending and apart. Behind the
        last they run too.
      look_back: as of `UpperLayers`.
      sizes: tokens of steps, ascending.
      rest_cost: what a step takes in which the upper layers rest, as a share of one that all run.
    """

    spans: tuple[tuple[int, int], ...]
    look_back: int
    sizes: tuple[int, ...]
    rest_cost: float

    @classmethod
    def of(
        cls,
        start: int,
        num_known: int,
        boundaries: Iterable[int],
        *,
        look_back: int,
        sizes: tuple[int, ...],
        rest_cost: float,
    ) -> Reading:
        """Plans it.

        Args:
          start: tokens that are there.
          num_known: tokens that are known.
          boundaries: what is needed, at most `num_known`; the last of them is the last boundary.
            Without any all layers read all tokens.
          look_back: as there.
          sizes: as there.
          rest_cost: as there.
        """
        spans: list[tuple[int, int]] = []
        ends = sorted({end for end in boundaries if end > start})
        for end in ends:
            begin = max(end - look_back, start)
            if spans and begin <= spans[-1][1]:
                begin = spans.pop()[0]
            spans.append((begin, num_known if end == ends[-1] else end))
        return cls(tuple(spans), look_back, sizes, rest_cost)

    def next_part(self, length: int) -> tuple[int | None, bool]:
        """How a request of a length is read on.

        Upper layers may rest for more or fewer whole steps up to the next span: the number is taken
        with which what is left up to the span's end costs least. So they do not rest where the span
        alone takes as many steps as with what lies before it.

        Args:
          length: tokens that are there.

        Returns:
          Tokens that are read alike, None where all are, and whether upper layers rest.
        """
        for begin, end in self.spans:
            if length >= end:
                continue
            most, sizes = max(begin - length, 0), self.sizes
            whole = {most // size * size for size in sizes}
            rested = min(
                sorted({0, most} | whole),
                key=lambda count: (
                    self.rest_cost * _step_rows(count, sizes)
                    + _step_rows(end - length - count, sizes)
                ),
            )
            return (rested, True) if rested else (end - length, False)
        return None, False

    def is_exact(self, end: int, upper_from: int) -> bool:
        """Whether all rings are what they should be at a boundary.

        Args:
          end: tokens before it.
          upper_from: from where on upper layers have run without a gap; -1 is from the start.
        """
        return upper_from < 0 or end - upper_from >= self.look_back


@functools.lru_cache(maxsize=4096)
def _step_rows(count: int, sizes: tuple[int, ...]) -> int:
    """Rows of the steps that read so many tokens, padding and what steps take beside included."""
    full, rest = divmod(count, sizes[-1])
    rows = full * (sizes[-1] + _ROWS_BESIDE)
    if not rest:
        return rows
    number = bisect.bisect_left(sizes, rest)
    ways = [sizes[number] + _ROWS_BESIDE]
    if number:
        ways.append(_step_rows(rest, sizes[:number]))
    return rows + min(ways)
