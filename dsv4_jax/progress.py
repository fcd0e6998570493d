"""How far a long work is: a bar on a terminal, elsewhere a line now and then, both on stderr."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from tqdm import tqdm

from dsv4_jax.standard_streams import say

FIRST_LINE_S = 3.0
"""Seconds of work before the first line: what is quicker needs none."""
NEXT_LINE_S = 15.0
"""Seconds from one line to the next."""
_TICK_S = 0.5


class Progress:
    """Counts a work's units and shows their number, as a context manager.

    `with Progress(283, unit="tensor", doing="loading") as bar: bar.add()`

    Lines come while a unit takes long too. They tell the time that is left by that of the units
    after the first one, which often compiles what the others run. It falls while a unit is under
    way, and where that takes longer than all that were to come, no time is told.
    """

    def __init__(
        self,
        total: int,
        *,
        unit: str,
        doing: str,
        shown: bool = True,
        has_bar: bool = True,
        compiles: bool = False,
    ) -> None:
        """Starts at 0.

        Args:
          total: units of the whole work.
          unit: what one is called.
          doing: what is done with it, such as "loading".
          shown: whether anything is shown at all.
          has_bar: a terminal shows a bar; else it shows lines as a file does.
          compiles: until the first unit is done, lines say that something is compiled.
        """
        self._total, self._unit, self._doing = total, unit, doing
        self._done = self._first_done = 0
        self._begun = self._first_end = self._last_end = time.monotonic()
        self._compiles = compiles
        self._bar: tqdm | None = None
        self._next_line = self._begun + FIRST_LINE_S
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        if shown and has_bar and self.has_terminal():
            self._bar = tqdm(total=total, unit=unit, desc=doing, file=sys.stderr)
        self._has_lines = shown and self._bar is None
        self._ticker: threading.Thread | None = None

    @staticmethod
    def has_terminal() -> bool:
        """Whether a bar can be shown."""
        return sys.stderr is not None and sys.stderr.isatty()

    def add(self, count: int = 1) -> None:
        """Counts units that are done."""
        self._done += count
        if count:
            self._last_end = time.monotonic()
        if not self._first_done:
            self._first_done, self._first_end = self._done, time.monotonic()
        if self._bar is not None:
            self._bar.update(count)
        self._tell()

    def end(self) -> None:
        """Ends the bar and the lines; nothing is shown from then on."""
        self._has_ended.set()
        if self._bar is not None:
            self._bar.close()

    def _tell(self) -> None:
        """Says a line if it is time for one."""
        with self._lock:
            now = time.monotonic()
            if not self._has_lines or self._has_ended.is_set() or now < self._next_line:
                return
            self._next_line = now + NEXT_LINE_S
            text = f"{self._doing}: {self._done:,} of {self._total:,} {self._unit}s after "
            if self._compiles and not self._done:
                text = f"{self._doing}: compiling, "
            elif self._total == 1:
                text = f"{self._doing}: "
            text += f"{now - self._begun:.0f} s"
            if self._first_done < self._done < self._total:
                pace = (self._last_end - self._first_end) / (self._done - self._first_done)
                left = pace * (self._total - self._done) - (now - self._last_end)
                text += f", some {left:.0f} s left" if left > 0 else ""
            say(text)

    def _tick(self) -> None:
        while not self._has_ended.wait(_TICK_S):
            self._tell()

    def __enter__(self) -> Self:
        """Itself."""
        if self._has_lines:
            name = f"progress of {self._doing}"
            self._ticker = threading.Thread(target=self._tick, name=name, daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the bar."""
        self.end()
        if self._ticker is not None:
            self._ticker.join()
