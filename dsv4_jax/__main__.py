"""`python -m dsv4_jax`, the same as `dsv4-jax`."""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

from dsv4_jax.signals import INTERRUPTED, end_at_once, flush_streams
from dsv4_jax.standard_streams import open_standard_streams, say

_FIRST_LINE_S = 1.0
"""Seconds of imports before a terminal is told of them."""


@contextlib.contextmanager
def _told_in_a_terminal() -> Iterator[None]:
    """Within it, a line says what takes so long if standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(_FIRST_LINE_S, say, ["[importing jax, which takes some seconds]"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Within it, nothing is looked at for garbage, of which imports make none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> int:
    """Runs `dsv4_jax.cli.main`; its import takes seconds, in which Ctrl-C may come as well.

    Returns:
      Its status; 2 if jax refuses a variable of the environment, and in the place of 0 if standard
      error could not take what was said. After Ctrl-C the process ends here.
    """
    notes = open_standard_streams()
    try:
        with end_at_once("dsv4-jax"), _told_in_a_terminal(), _uncollected():
            from dsv4_jax import cli

            cli.import_command(sys.argv[1:])
    except ValueError as error:  # of jax, which reads JAX_* as it is imported
        say(f"dsv4-jax: the environment must be one that jax takes: {error}")
        return 2
    status = cli.main()
    if status == INTERRUPTED:  # Python would wait for threads, which may compile for a minute
        flush_streams()
        os._exit(status)
    return status or 2 * notes.have_lost


if __name__ == "__main__":
    sys.exit(main())
