"""How far a long work is: a bar on a terminal, elsewhere a line now and then, both on stderr."""

from __future__ import annotations

import sys
import time
from typing import Self

from tqdm import tqdm

from dsv4_jax.standard_streams import say

FIRST_LINE_S = 5.0
"""Seconds of work before the first line: what is quicker needs none."""
NEXT_LINE_S = 15.0
"""Seconds from one line to the next."""


class Progress:
    """Counts a work's units and shows their number, as a context manager.

    `with Progress(283, unit="tensor", doing="loading") as bar: bar.add()`
    """

    def __init__(self, total: int, *, unit: str, doing: str, shown: bool = True) -> None:
        """Starts at 0.

        Args:
          total: units of the whole work.
          unit: what one is called.
          doing: what is done with it, such as "loading".
          shown: whether anything is shown at all.
        """
        self._total, self._unit, self._doing = total, unit, doing
        self._done = 0
        self._begun = time.monotonic()
        self._bar: tqdm | None = None
        self._next_line = self._begun + FIRST_LINE_S if shown else float("inf")
        if shown and self.has_terminal():
            self._bar = tqdm(total=total, unit=unit, desc=doing, file=sys.stderr)
            self._next_line = float("inf")

    @staticmethod
    def has_terminal() -> bool:
        """Whether a bar can be shown."""
        return sys.stderr is not None and sys.stderr.isatty()

    def add(self, count: int = 1) -> None:
        """Counts units that are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + NEXT_LINE_S
            say(
                f"{self._doing}: {self._done:,} of {self._total:,} {self._unit}s after "
                f"{now - self._begun:.0f} s"
            )

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
