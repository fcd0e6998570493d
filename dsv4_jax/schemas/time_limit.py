"""Time limit: reading schemas ends when it has taken too long."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

_limit: contextvars.ContextVar[tuple[float, float] | None] = contextvars.ContextVar(
    "limit", default=None
)
"""When it ends, on the clock of the thread, and after how many seconds that is."""


class TooLongError(ValueError):
    """Schemas took longer to read than they may. Unlike a `SchemaError` it leaves nothing out."""


@contextlib.contextmanager
def reading_within(seconds: float) -> Iterator[None]:
    """Lets schemas take so many seconds of a processor inside, all together.

    Raises:
      TooLongError: they took longer.
    """
    token = _limit.set((time.thread_time() + seconds, seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Ends what has taken too long; where there is no limit, nothing."""
    limit = _limit.get()
    if limit is not None and time.thread_time() > limit[0]:
        raise TooLongError(
            f"schemas must be read within {limit[1]:g} s of a processor, all together; ask for "
            "less, such as fewer properties, choices and references"
        )
