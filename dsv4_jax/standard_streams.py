"""The standard streams of a command's process: in UTF-8, and each with a descriptor of its own.

A process may be started with any of them closed, as `2>&-` does. Python then has None in its place,
and `print` takes standard output where it is given None. The next file that is opened gets the free
descriptor, so that what XLA writes to descriptor 2 would land in that file.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from typing import Any, TextIO


class Notes(io.FileIO):
    """The bytes of standard error: what cannot be written is lost, and stops no work.

    Attributes:
      have_lost: whether something is.
    """

    have_lost = False

    def write(self, data: Any, /) -> int:
        """Writes all of it or nothing; raises OSError only if a reader has gone."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            self.have_lost = True
            return len(data)


class _Answers(io.FileIO):
    """The bytes of standard output; an error of writing them says so."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


def open_standard_streams() -> Notes:
    """Opens what is closed, and makes both outputs UTF-8; call it before files are opened.

    From a stream that was closed nothing can be read, and to it nothing can be written, as before;
    `sys.stdin` stays None. The outputs are UTF-8 whatever the locale is, so that answers in a file
    are the same bytes everywhere.

    Returns:
      What is behind `sys.stderr` now.
    """
    if sys.stdin is None:
        _fill(os.O_WRONLY)
    answers = _Answers(1 if sys.stdout is not None else _fill(os.O_RDONLY), "w", closefd=False)
    notes = Notes(2 if sys.stderr is not None else _fill(os.O_RDONLY), "w", closefd=False)
    unbuffered = sys.stdout is not None and sys.stdout.write_through  # pyright: ignore
    sys.stdout = _text(answers, line_buffering=answers.isatty() or unbuffered)
    sys.stderr = _text(notes, line_buffering=True)
    return notes


def say(text: str, end: str = "\n") -> None:
    """Writes on standard error at once, if there is one."""
    if sys.stderr is not None:
        print(text, end=end, file=sys.stderr, flush=True)


def takes_answers() -> bool:
    """Whether standard output is there, and open for writing."""
    if sys.stdout is None:
        return False
    try:
        mode = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL)
    except io.UnsupportedOperation:  # text that Python collects
        return True
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return False
    return mode & os.O_ACCMODE != os.O_RDONLY


def _fill(access: int) -> int:
    """Opens `/dev/null` at the lowest free descriptor; the wrong way round, writing gets EBADF."""
    descriptor = os.open(os.devnull, access)
    os.set_inheritable(descriptor, True)
    return descriptor


def _text(raw: io.FileIO, *, line_buffering: bool) -> TextIO:
    """UTF-8 over these bytes; what it lacks, lone surrogates, is shown by its number."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=line_buffering,
    )
