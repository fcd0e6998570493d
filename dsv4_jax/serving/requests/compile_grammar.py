"""Compiling a grammar for llguidance; run as a program, in a process of its own.

The program is a helper of `helper_processes`. It is greeted with the vocabulary, then gets one
grammar after another, and answers each with what is wrong with it, or "", and with the bytes that
it holds. A grammar that takes too long, or so much memory that llguidance cannot go on, ends the
process. It imports nothing of this package, so that it starts without jax.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_ITEMS = 2**15
"""Places of a grammar that llguidance follows at once; an object has some for each property."""

MAX_LEXER_STATES = 2**16
"""That an answer may make llguidance note, of a fraction of a kilobyte each."""

OUT_OF_MEMORY = 77
"""Status of the program where Python had none; where llguidance had none, it is SIGABRT's."""

_TRIED_TOKENS = 24
"""Of an answer that is drawn before a grammar is taken."""


def read_vocabulary(tokenizer_json: str, vocab_size: int, end_tokens: Sequence[int]) -> LLTokenizer:
    """A tokenizer as llguidance has it; a second for V4's.

    Args:
      tokenizer_json: contents of `tokenizer.json`.
      vocab_size: ids of the model.
      end_tokens: those that end an answer.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(end_tokens))


class Compiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        """For what `read_vocabulary` gave."""
        self._vocabulary = vocabulary

    def compile(self, text: str) -> LLMatcher:
        """What follows an answer from its first token on, of a grammar as llguidance has it.

        Raises:
          ValueError: it is none, is too complex, or nothing fulfils it.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=MAX_ITEMS,
            step_max_items=8 * MAX_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
        )
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        self._try(matcher)
        return matcher

    def allowed(self, matcher: LLMatcher) -> np.ndarray:
        """The tokens that may come next, ascending."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._vocabulary.vocab_size])

    def _try(self, matcher: LLMatcher) -> None:
        """Draws the beginning of an answer, so that what llguidance sees only then is seen now.

        Tokens that a grammar names are taken where they may come, and others by chance.
        """
        if matcher.is_error():
            raise ValueError(problem_of(matcher))
        ahead, rng = matcher.deep_copy(), np.random.default_rng(0)
        for _ in range(_TRIED_TOKENS):
            allowed = self.allowed(ahead)
            if ahead.is_error() or not allowed.size:
                raise ValueError(problem_of(ahead) or "nothing fulfils it")
            named = [one for one in allowed[-8:] if self._vocabulary.is_special_token(int(one))]
            token = int(named[0] if named else rng.choice(allowed))
            if token in self._vocabulary.eos_tokens:
                return
            if not ahead.consume_token(token):
                raise ValueError(problem_of(ahead))


def problem_of(matcher: LLMatcher) -> str:
    """What llguidance says, without its state."""
    told = matcher.get_error().partition("\n<state>")[0].strip()
    return "nothing fulfils it" if told == "NoExtensionBias" else told


def limit_memory(more_bytes: int | None) -> None:
    """Lets this process have so much more memory than it has; None lets it have any."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if more_bytes is not None:
        used = _data_bytes()
        if used is None:
            return
        most = used + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _data_bytes() -> int | None:
    """Memory of this process that the limit is of; None where no file says it, as on macOS."""
    try:
        with open("/proc/self/status") as status:
            (used_kb,) = (int(line.split()[1]) for line in status if line.startswith("VmData"))
    except OSError:
        return None
    return 1024 * used_kb


class _Mallinfo(ctypes.Structure):
    """What glibc says of its allocator since 2.33; `man 3 mallinfo`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _used_bytes() -> int:
    """Memory that is in use, without what the allocator keeps for the next; else about that."""
    read: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return _data_bytes() or 0
    read.restype = _Mallinfo
    usage = read()
    return usage.uordblks + usage.hblkhd


def start_helper() -> Connection:
    """Makes this process a helper: the way to the one that started it.

    Its work gives way to that of the server, which other clients wait for.
    """
    # Who ends a whole group of processes lets the server finish: it needs this one until then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a bound may end it by SIGABRT
    os.nice(10)
    return Connection(0)


def jobs(connection: Connection) -> Iterator[Any]:
    """What a helper is sent, until there is no more."""
    with contextlib.suppress(EOFError):
        while True:
            yield connection.recv()


def _main() -> None:
    import llguidance  # noqa: F401  # who starts this without a greeting is told what is missing

    connection = start_helper()
    todo = jobs(connection)
    for greeting in todo:
        _compile_all(Compiler(read_vocabulary(**greeting)), connection, todo)


def _compile_all(compiler: Compiler, connection: Connection, todo: Iterator[Any]) -> None:
    compiler.compile("start: /a/")  # which allocates what all grammars need
    for job in todo:
        told, matcher, before = "", None, _used_bytes()
        limit_memory(job["memory_bytes"])
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])  # the end of a process, unhandled
        try:
            matcher = compiler.compile(job["text"])
        except ValueError as error:
            told = str(error)
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        limit_memory(None)
        connection.send((told, max(0, _used_bytes() - before)))
        del matcher


if __name__ == "__main__":
    _main()
