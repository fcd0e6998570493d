"""Calls of an engine: one at a time, and each does all that it should or nothing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Concatenate, Protocol

import numpy as np

_ABSENT = object()


class CacheError(RuntimeError):
    """The verifier found a problem in the cache; the message lists what."""


class UndoLog:
    """What attributes were before a call changed them.

    `with log:` is one change. What it changes it saves first. If it ends well, the log is forgotten
    in one store; until then an exception at any place, such as `KeyboardInterrupt`, undoes it. The
    log of a change that raised stands until `forget`: what follows from the attributes, such as who
    holds which slot, has to be made anew before the next change.
    """

    def __init__(self, *always: object) -> None:
        """No change is in progress.

        Args:
          *always: objects that every change saves.
        """
        self._always = always
        self._saved: list[tuple[Any, Any]] | None = None

    @property
    def stands(self) -> bool:
        """A change is in progress, or has raised."""
        return self._saved is not None

    def save(self, target: object) -> None:
        """Attributes of an object that the change will assign; what they hold must not change."""
        self._append(vars(target), dict(vars(target)))

    def save_item(self, mapping: MutableMapping, key: object) -> None:
        """An item that the change will add, replace or remove."""
        self._append(mapping, {key: mapping.get(key, _ABSENT)})

    def save_array(self, array: np.ndarray) -> None:
        """An array, or a view, that the change will write to."""
        self._append(array, array.copy())

    def before(self, target: object) -> dict[str, Any]:
        """Attributes of one of the objects that every change saves, as no change has left them."""
        for mapping, saved in self._saved or ():
            if mapping is vars(target):
                return saved
        return vars(target)

    def roll_back(self) -> None:
        """Makes everything saved what it was; once more does no harm."""
        for mapping, saved in reversed(self._saved or ()):
            if isinstance(mapping, np.ndarray):
                mapping[...] = saved
                continue
            for key, value in saved.items():
                if value is _ABSENT:
                    mapping.pop(key, None)
                else:
                    mapping[key] = value

    def forget(self) -> None:
        """What holds now is what holds."""
        self._saved = None

    def __enter__(self) -> None:
        """Begins a change."""
        assert self._saved is None
        self._saved = [(vars(target), dict(vars(target))) for target in self._always]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends it; here is where it becomes true."""
        if kind is None:
            self._saved = None
        else:
            self.roll_back()

    def _append(self, mapping: Any, saved: Any) -> None:
        assert self._saved is not None, "nothing changes outside of a change"
        self._saved.append((mapping, saved))


class CallLock:
    """Who may call an engine: one call at a time, and the thread that holds it where one does.

    Attributes:
      lock: taken while a call is in progress.
      holder: the thread that alone may call; None is any.
    """

    def __init__(self) -> None:
        """Nobody calls, and any thread may."""
        self.lock = threading.Lock()
        self.holder: threading.Thread | None = None

    def hold(self, thread: threading.Thread) -> None:
        """Gives the engine to a thread, which alone may call it until `release`."""
        self.holder = thread

    def release(self, thread: threading.Thread) -> None:
        """Takes the engine back from a thread, if that holds it."""
        if self.holder is thread:
            self.holder = None

    def refuse_if_held(self, happened: str) -> None:
        """Raises `RuntimeError` where another thread holds the engine.

        Args:
          happened: what the caller did, for the message.
        """
        if self.holder is not None and self.holder is not threading.current_thread():
            raise RuntimeError(
                f"an AsyncEngine holds the engine, and only its thread may call it, but {happened} "
                "beside it; use that AsyncEngine, or close it first (Server and batch close "
                "theirs when they end)"
            )

    def refuse_if_busy(self, happened: str) -> None:
        """Raises `RuntimeError` where another thread holds the engine, or a call is in progress."""
        if self.holder is not None:
            self.refuse_if_held(happened)
        if self.lock.locked():
            raise RuntimeError(
                f"an engine does one call at a time, and {happened} while another call was in "
                "progress; where several threads use an engine, hold one lock around every call; "
                "in a signal handler or a tokenizer, note what you want and call when the other "
                "call has returned"
            )


class Exclusive(Protocol):
    """Who has methods that are `exclusive`."""

    call_lock: CallLock

    def _settle(self) -> None:
        """What a call does first."""


def exclusive[S: Exclusive, **P, R](
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """A public method that is refused while another one is in progress, in any thread.

    So it is while another thread holds the engine, as that of an `AsyncEngine` does. The method
    raises `RuntimeError` then, and has touched nothing.
    """
    return _exclusive(method, f"{method.__name__} was called")


class exclusive_as:
    """`exclusive` for what is no public method."""

    def __init__(self, happened: str) -> None:
        """`happened` says what its user did, for the message."""
        self._happened = happened

    def __call__[S: Exclusive, **P, R](
        self, method: Callable[Concatenate[S, P], R]
    ) -> Callable[Concatenate[S, P], R]:
        """See `exclusive`."""
        return _exclusive(method, self._happened)


def _exclusive[S: Exclusive, **P, R](
    method: Callable[Concatenate[S, P], R], happened: str
) -> Callable[Concatenate[S, P], R]:
    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        self.call_lock.refuse_if_busy(happened)
        # Nothing can be raised between taking the lock and being inside, since `with` does both in
        # C. Who comes between the question above and here waits for the other call to end.
        with self.call_lock.lock:
            if self.call_lock.holder is not None:  # that call may have given it to a thread
                self.call_lock.refuse_if_held(happened)
            self._settle()
            return method(self, *args, **kwargs)

    return call
