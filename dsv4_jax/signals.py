"""Signals: SIGINT and SIGTERM end a process at once, or soon, and no SIGINT is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""128 and the number of SIGINT, as a shell says it."""

_SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_MOMENT_S = 0.01
_FLUSH_S = 0.2
TIME_TO_END_S = 2.0
"""Seconds after Ctrl-C in which a command may close its files."""


@contextlib.contextmanager
def end_at_once(name: str) -> Iterator[None]:
    """Within it, SIGINT and SIGTERM end the process wherever it is.

    It says so in a line, and its status is that of a shell, 128 and the signal's number. Python's
    own way with SIGINT is to raise KeyboardInterrupt where the main thread is. In a callback of the
    garbage collector, such as jax's, or of a weak reference, that is printed and forgotten, and a
    library may catch it too. Where the main thread compiles, it is raised when that is done. So
    this raises nothing, and a thread waits for the signal beside the main one. A handler is also
    what the first process of a container needs, to which signals do nothing otherwise.

    A signal that the process was started to ignore is left alone. Outside the main thread, which
    alone may set handlers, this does nothing.

    Args:
      name: what the line begins with.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    lock = threading.Lock()

    def end(number: int, frame: FrameType | None = None) -> None:
        if not lock.acquire(blocking=False):
            return  # the other thread is just doing it
        _end(name, number)

    before = {
        number: signal.signal(number, end)
        for number in _SAID
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        with _watched(end):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def end_soon(name: str, seconds: float = TIME_TO_END_S) -> Iterator[None]:
    """Within it, a process that got SIGINT has so many seconds to end in its own way.

    That is Python's: KeyboardInterrupt is raised where the main thread is, and files are closed as
    they should be. It is not raised while the main thread compiles, and what it goes through may
    wait for threads that compile. So a thread waits beside the main one. Where this was not left in
    time, it writes what standard output holds back, says in a line that the process was
    interrupted, and ends it with status 130.

    A signal that the process was started to ignore is left alone. Outside the main thread this does
    nothing.

    Args:
      name: what the line begins with.
      seconds: how many.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_left = threading.Event()

    def end(number: int) -> None:
        if number != signal.SIGINT or is_left.wait(seconds):
            return
        flush = threading.Thread(target=flush_streams, daemon=True)  # whose reader may not read
        flush.start()
        flush.join(_FLUSH_S)
        _end(name, number)

    with _watched(end):
        try:
            yield
        finally:
            is_left.set()


def flush_streams() -> None:
    """Writes what standard output and standard error hold back, if they can be written."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _end(name: str, number: int) -> NoReturn:
    if sys.stderr is not None:  # else the number of stderr may be that of another file
        with contextlib.suppress(OSError):
            os.write(2, f"{name}: {_SAID[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


@contextlib.contextmanager
def _watched(end: Callable[[int], None]) -> Iterator[None]:
    """Within it, a thread calls `end` with the number of each signal of `_SAID` that comes."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write)
    watch = threading.Thread(target=_watch, args=(read, end), daemon=True, name="dsv4-jax-signals")
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(write)
        watch.join()
        os.close(read)


def _watch(read: int, end: Callable[[int], None]) -> None:
    """Python writes the number of each signal that has a handler, whatever the main thread does."""
    while number := os.read(read, 1):
        if number[0] in _SAID:
            end(number[0])


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """Within it, a KeyboardInterrupt that Python would print and forget is raised once more.

    Those are the ones in callbacks of the garbage collector and of weak references, and in
    `__del__`. SIGINT comes again a moment later, when the main thread has left the callback.
    """
    before = sys.unraisablehook

    def repeat(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            has_left = threading.Event()  # a signal within this hook would be lost once more
            threading.Thread(target=_interrupt_after, args=(has_left,), daemon=True).start()
            has_left.set()
        else:
            before(lost)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_after(has_left: threading.Event) -> None:
    has_left.wait()
    time.sleep(_MOMENT_S)
    os.kill(os.getpid(), signal.SIGINT)
