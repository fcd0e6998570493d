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
NEXT_LINE_S = 5.0
"""Seconds from one line to the next, of work of up to `LONG_S`."""
LATER_LINE_S = 30.0
"""Seconds from one line to the next, of what takes longer."""
LONG_S = 600.0
_TICK_S = 0.5


class Progress:
    """Counts a work's units and shows their number, as a context manager.

    `with Progress(283, unit="tensor", doing="loading") as bar: bar.add()`

    Lines come while a unit takes long too. They tell the time that is left by that of the units
    after the first one, which often compiles what the others run. It falls while a unit is under
    way, and where that takes longer than all that were to come, no time is told.

    A unit whose name `begin` told is named, with its number; of several at once the numbers are
    told. Seconds are those of the whole work. Any thread may call `begin` and `add`.

    Attributes:
      tells_left: whether the time that is left is told; it may change as work goes on.
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
        tells_left: bool = True,
    ) -> None:
        """Starts at 0.

        Args:
          total: units of the whole work.
          unit: what one is called.
          doing: what is done with it, such as "loading".
          shown: whether anything is shown at all.
          has_bar: a terminal shows a bar; else it shows lines as a file does.
          compiles: until the first unit is done, lines say that something is compiled.
          tells_left: units are alike enough for the time that is left to be told.
        """
        self._total, self._unit, self._doing = total, unit, doing
        self._done = self._first_done = 0
        self._begun = self._first_end = self._last_end = time.monotonic()
        self._compiles, self.tells_left = compiles, tells_left
        self._names: list[str] = []
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

    def begin(self, name: str) -> None:
        """Names a unit that begins; it is under way until `add` is given the same name."""
        with self._lock:
            self._names.append(name)
            if self._bar is not None:
                self._bar.set_postfix_str(name)
        self._tell()

    def add(self, count: int = 1, *, name: str | None = None) -> None:
        """Counts units that are done, or the one that `begin` was given the name of."""
        with self._lock:
            if name is not None:
                self._names.remove(name)
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
            spent = now - self._begun
            self._next_line = now + (NEXT_LINE_S if spent < LONG_S else LATER_LINE_S)
            of_all = " in all" if self._names and self._done else ""
            text = f"{self._told_place()}{spent:.0f} s{of_all}"
            if self.tells_left and self._first_done < self._done < self._total:
                pace = (self._last_end - self._first_end) / (self._done - self._first_done)
                left = pace * (self._total - self._done) - (now - self._last_end)
                text += f", some {left:.0f} s left" if left > 0 else ""
            say(text)

    def _told_place(self) -> str:
        """What is done and under way; the time that it has taken comes after it."""
        names, number, total = self._names, self._done + 1, f"{self._total:,}"
        if len(names) > 1:
            last = self._done + len(names)
            return f"{self._doing} {self._unit}s {number:,} to {last:,} of {total}: "
        if names:
            return f"{self._doing} {self._unit} {number:,} of {total} ({names[0]}): "
        if self._compiles and not self._done:
            return f"{self._doing}: compiling, "
        if self._total == 1:
            return f"{self._doing}: "
        return f"{self._doing}: {self._done:,} of {total} {self._unit}s after "

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
