"""The package `triton`, as threads that lower kernels at once may use it.

Modules of `triton` import one another in a circle, so that a thread that imports one of them beside
another thread may find it half made. And what its options are is the same for all threads.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any

_lock = threading.RLock()
_options = contextlib.ExitStack()
_users = 0
"""Threads that compile without lines, in `without_line_info`."""


def load(name: str) -> Any:
    """A module of `triton`, or one that imports it, once every other thread has loaded its own."""
    with _lock:
        return importlib.import_module(name)


@contextlib.contextmanager
def without_line_info() -> Iterator[None]:
    """Lines of a source that no one has, which would be three quarters of the PTX."""
    global _users
    knobs = load("triton.knobs")
    with _lock:
        if not _users:
            _options.enter_context(_lines_left_out(knobs))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _options.close()


@contextlib.contextmanager
def _lines_left_out(knobs: Any) -> Iterator[None]:
    """Triton's option, which it would write into the environment, where other threads read it."""
    options, told = knobs.compilation, knobs.propagate_env
    before = vars(options).get("disable_line_info")
    knobs.propagate_env = False
    options.disable_line_info = True
    yield
    if before is None:
        del options.disable_line_info
    else:
        options.disable_line_info = before
    knobs.propagate_env = told
