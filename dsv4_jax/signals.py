"""Signals: SIGINT and SIGTERM end a process at once, and no SIGINT is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_MOMENT_S = 0.01


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
        if sys.stderr is not None:  # else the number of stderr may be that of another file
            with contextlib.suppress(OSError):
                os.write(2, f"{name}: {_SAID[signal.Signals(number)]}\n".encode())
        os._exit(128 + number)

    before = {
        number: signal.signal(number, end)
        for number in _SAID
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    read, write = os.pipe()
    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write)
    watch = threading.Thread(target=_watch, args=(read, end), daemon=True, name="dsv4-jax-signals")
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
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
