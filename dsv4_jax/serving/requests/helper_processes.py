"""Processes of their own for work that may end them, or that would hold up every thread here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import Any

from dsv4_jax.serving.requests.compile_grammar import OUT_OF_MEMORY

START_S = 60
"""Seconds to start in, and to read a tokenizer."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that nothing in a process gives itself."""


_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RUST_BACKTRACE": "0",
}
"""Devices are left alone, and work takes one processor. Rust's libraries would start a thread for
each one of the machine with the first work, whose stacks count as memory of that work. A trace of
where memory ran out takes memory, and waits forever for the lock that it has itself."""


class HelpersClosedError(RuntimeError):
    """No helper works any more, since the server that asked for it ends."""


class HelperKilledError(RuntimeError):
    """Somebody else ended a helper at its work, such as a kernel that has no memory left."""


class HelperEndedError(RuntimeError):
    """A helper ended at its work.

    Attributes:
      status: of its process; a signal is negative.
      is_late: it went beyond its time, and was ended here or by its own timer.
      is_short: it had no memory left within its bound.
    """

    def __init__(self, status: int, *, was_ended: bool) -> None:
        """Of a process with that status, which was ended here where it took too long."""
        super().__init__(f"a helper ended with status {status}")
        self.status = status
        self.is_late = was_ended or status == -signal.SIGPROF
        self.is_short = status in (-signal.SIGABRT, OUT_OF_MEMORY)


class HelperProcesses:
    """Processes of one program, each of which does one piece of work at a time.

    Any thread may come. A process is started when it is needed, gets the greeting first, and goes
    on with the next piece of work. Its program talks by its standard input, which is a
    `multiprocessing.connection.Connection` both ways, and ends when that does.
    """

    def __init__(self, command: Sequence[str], greeting: Any, *, work: str) -> None:
        """Starts nothing yet.

        Args:
          command: the program.
          greeting: what each process is sent first; it pickles.
          work: what it does, for errors.
        """
        self._command = tuple(command)
        self._greeting = greeting
        self._work = work
        self._lock = threading.Lock()  # of which processes there are, and whether more may start
        self.living: set[Helper] = set()
        self.idle: list[Helper] = []
        self._is_closed = False

    def prepare(self) -> None:
        """Starts a process before there is work."""
        self.idle.append(self._start())

    def ask(self, job: Any, *, patience_s: float) -> Any:
        """What a process answers.

        Args:
          job: what it is sent; it pickles.
          patience_s: seconds on the clock after which it is ended.

        Raises:
          HelpersClosedError: `close` was called, before it or meanwhile.
          HelperKilledError: a signal from outside ended the process.
          HelperEndedError: the process ended in another way.
        """
        helper = self._take()
        try:
            answer = helper.ask(job, START_S + patience_s)
        except (EOFError, OSError):
            status = self._bury(helper)
            self._check_open()
            if -status in _FROM_OUTSIDE and not helper.was_ended:
                raise HelperKilledError(
                    f"the process that {self._work} was ended from outside, with signal {-status}, "
                    "as a machine without free memory does; try again later"
                ) from None
            raise HelperEndedError(status, was_ended=helper.was_ended) from None
        self.idle.append(helper)
        if self._is_closed:
            self.close()
        return answer

    def close(self) -> None:
        """Ends the processes, whatever they do, and starts no more; from any thread."""
        with self._lock:
            self._is_closed = True
            living = list(self.living)
        for helper in living:
            helper.process.kill()  # the thread that waits for one that works is told so
        while self.idle:
            self._bury(self.idle.pop())

    def _take(self) -> Helper:
        """A process that has nothing to do."""
        while True:
            try:
                helper = self.idle.pop()
            except IndexError:
                return self._start()
            if helper.process.poll() is None:
                return helper
            self._bury(helper)

    def _start(self) -> Helper:
        with self._lock:
            self._check_open()
            helper = Helper(self._command)
            self.living.add(helper)
        with contextlib.suppress(OSError):  # the next answer says so
            helper.connection.send(self._greeting)
        return helper

    def _bury(self, helper: Helper) -> int:
        """Ends a process and forgets it; its status."""
        status = helper.end()
        with self._lock:
            self.living.discard(helper)
        return status

    def _check_open(self) -> None:
        if self._is_closed:
            raise HelpersClosedError(f"no process that {self._work} is started any more")


class Helper:
    """One process.

    Attributes:
      process: itself.
      connection: to its program.
      was_ended: it took too long, and was ended here.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Starts it."""
        self.was_ended = False
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # a key that interrupts the server is not for it
            )

    def ask(self, job: Any, patience_s: float) -> Any:
        """What it answers.

        Raises:
          EOFError, OSError: it has ended, as it does when the time is over.
        """
        timer = threading.Timer(patience_s, self._end_late)
        timer.daemon = True
        timer.start()
        try:
            self.connection.send(job)
            return self.connection.recv()
        finally:
            timer.cancel()

    def end(self) -> int:
        """Ends it, if it has not ended; its status, which of a signal is negative."""
        self.connection.close()
        try:
            return self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _end_late(self) -> None:
        self.was_ended = True
        self.process.kill()
