"""Trials of grammars: whether one compiles within bounds, seen in a process that may end by it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from dsv4_jax.serving.requests import compile_grammar

_NUM_KNOWN = 4096
"""Grammars of which it is remembered that they compile."""

_PATIENCE = 10
"""Seconds on the clock for one of the processor, where others compute too."""

_START_S = 60
"""Seconds to start in and read a tokenizer."""

_COMMAND = (sys.executable, "-P", compile_grammar.__file__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarBounds:
    """What compiling one grammar may take.

    Attributes:
      seconds: of a processor.
      memory_bytes: that the compiled grammar and the work on it hold.
      at_once: grammars that are compiled at the same time; others wait for their turn.
    """

    seconds: float = 2.0
    memory_bytes: int = 128 * 2**20
    at_once: int = 2


class TrialsClosedError(RuntimeError):
    """Grammars are compiled no more, since the server that asked for it ends."""


class GrammarTrials:
    """Compiles grammars in processes of their own, which are ended where it takes too much.

    Nothing in a process can end what llguidance has begun. What has passed here takes the same
    time and memory where it is compiled to be followed. Any thread may come; a process is started
    when it is needed, and goes on with the next grammar.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        end_tokens: Sequence[int],
        bounds: GrammarBounds,
    ) -> None:
        """Starts nothing yet; arguments as those of `read_vocabulary`."""
        self._vocabulary = json.dumps(
            {
                "tokenizer_json": tokenizer_json,
                "vocab_size": vocab_size,
                "end_tokens": list(end_tokens),
            }
        )
        self._bounds = bounds
        self._turns = threading.BoundedSemaphore(bounds.at_once)
        self._lock = threading.Lock()  # of which processes there are, and whether more may start
        self._living: set[subprocess.Popen[str]] = set()
        self._idle: list[subprocess.Popen[str]] = []
        self._known: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._is_closed = False

    def prepare(self) -> None:
        """Starts a process, which reads the tokenizer, before the first grammar comes."""
        self._idle.append(self._start())

    def check(self, text: str) -> None:
        """Compiles a grammar, as llguidance has it, and forgets all but that it compiles.

        Raises:
          ValueError: it is no grammar, or compiling it goes beyond a bound; the error names it.
          TrialsClosedError: `close` was called, before it or meanwhile.
          RuntimeError: the program that compiles does not run here.
        """
        digest = hashlib.sha256(text.encode()).digest()
        if digest in self._known:
            return
        with self._turns:
            if told := self._try(text):
                raise ValueError(told)
        self._known[digest] = None
        while len(self._known) > _NUM_KNOWN:
            self._known.popitem(last=False)

    def close(self) -> None:
        """Ends the processes, whatever they compile, and starts no more; from any thread."""
        with self._lock:
            self._is_closed = True
            living = list(self._living)
        for process in living:
            process.kill()  # the thread that waits for one that compiles is told so
        while self._idle:
            self._bury(self._idle.pop())

    def _try(self, text: str) -> str:
        """What is wrong with a grammar; "" if nothing is."""
        process = self._take()
        job = {
            "text": text,
            "seconds": self._bounds.seconds,
            "memory_bytes": self._bounds.memory_bytes,
        }
        answer = _ask(process, json.dumps(job), _START_S + _PATIENCE * self._bounds.seconds)
        if answer is None:
            status = self._bury(process)
            self._check_open()
            return self._ended_by(status)
        self._idle.append(process)
        if self._is_closed:
            self.close()
        return json.loads(answer)

    def _take(self) -> subprocess.Popen[str]:
        """A process that has nothing to do."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return self._start()
            if process.poll() is None:
                return process
            self._bury(process)

    def _start(self) -> subprocess.Popen[str]:
        with self._lock:
            self._check_open()
            process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # it imports the same
                start_new_session=True,  # a key that interrupts the server is not for it
            )
            self._living.add(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next read says so
            process.stdin.write(self._vocabulary + "\n")
        return process

    def _bury(self, process: subprocess.Popen[str]) -> int:
        """Ends a process and forgets it; its status."""
        status = _end(process)
        with self._lock:
            self._living.discard(process)
        return status

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrialsClosedError("no grammar is compiled any more")

    def _ended_by(self, status: int) -> str:
        """What a process has ended by, as the rule that a grammar broke."""
        bounds = self._bounds
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return (
                f"it must compile within {bounds.seconds:g} s of a processor; ask for less, such "
                "as fewer properties, choices and repetitions"
            )
        if status in (-signal.SIGABRT, compile_grammar.OUT_OF_MEMORY):
            return (
                f"it must compile within {bounds.memory_bytes // 2**20} MiB of memory; ask for "
                "less, such as fewer properties, choices and repetitions"
            )
        if status >= 0:
            raise RuntimeError(
                f"the program that compiles grammars ended with status {status}; see why it cannot "
                f"run: echo '{{}}' | {shlex.join(_COMMAND)}"
            )
        return f"it ends the library that compiles it, with signal {-status}"


def _ask(process: subprocess.Popen[str], line: str, patience_s: float) -> str | None:
    """The line that a process answers; None if it ends, as it does when the time is over."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(patience_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline() or None
    except BrokenPipeError:
        return None
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[str]) -> int:
    """Ends a process that may have ended; its status, which of a signal is negative."""
    assert process.stdin is not None
    assert process.stdout is not None
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what was not sent to it
            pipe.close()
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
