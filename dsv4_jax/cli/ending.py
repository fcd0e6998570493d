"""How a command ends: with a status and at most one message, never with a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from dsv4_jax.cli.parser import UsageError
from dsv4_jax.signals import INTERRUPTED, end_soon, keep_interrupts
from dsv4_jax.standard_streams import say

CLOSED_PIPE = 141
"""128 and the number of SIGPIPE."""


def run_to_status(name: str, run: Callable[[], int]) -> int:
    """Runs a command and gives the status of its process.

    Args:
      name: what messages begin with.
      run: the command; its result is its status.

    Returns:
      That status; 2 for bad input, for files and outputs that cannot be read or written, for an
      environment that JAX cannot start in and for a warning that was made an error, 1 if the device
      failed or memory is too small, 130 after Ctrl-C, 141 if the reader of the output has gone.
      Where Ctrl-C does not end the command soon, the process ends (`end_soon`).
    """
    _show_any_text()
    try:
        with end_soon(name), keep_interrupts():
            status = run()
        flush_answers()
        return status
    except BrokenPipeError:
        _discard_output()
        return CLOSED_PIPE
    except KeyboardInterrupt:
        return _say(f"{name}: interrupted", INTERRUPTED)
    except UsageError as error:
        return _say(str(error), 2)
    except (ValueError, OSError, NotImplementedError, Warning) as error:  # as of `python -W error`
        return _say(f"{name}: {error}", 2)
    except MemoryError as error:
        return _say(f"{name}: {str(error).strip() or 'not enough memory'}", 1)
    except (RuntimeError, AssertionError) as error:
        return _say(*_explain(name, error))


def _explain(name: str, error: Exception) -> tuple[str, int]:
    """What to say of an error of JAX, and the status; any other one is raised as it is."""
    import jax  # which a command has imported, unless it only showed help

    from dsv4_jax.runtime import find_start_problem

    if isinstance(error, jax.errors.JaxRuntimeError):
        return f"{name}: {str(error).strip() or 'not enough memory'}", 1
    problem = find_start_problem(error)
    if problem is None:
        raise error
    return f"{name}: {problem}", 2


def flush_answers() -> None:
    """Writes what standard output holds back.

    Raises:
      OSError: it cannot be written.
    """
    if sys.stdout is not None:
        sys.stdout.flush()


def _say(message: str, status: int) -> int:
    """Prints the message after what was printed before it."""
    try:
        flush_answers()
    except OSError:
        _discard_output()
    try:
        say(message)
    except OSError:
        _discard_output()
    return status


def _show_any_text() -> None:
    """Lets what a terminal's encoding lacks be shown by its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Sends what is still to be written nowhere, or Python would fail to write it at its end."""
    with open(os.devnull, "wb") as nowhere:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except OSError:
                os.dup2(nowhere.fileno(), stream.fileno())
