"""Trials of grammars: whether one compiles within bounds, seen in a process that may end by it."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import shlex
import sys
import threading
from collections.abc import Sequence

from dsv4_jax.serving.requests import compile_grammar
from dsv4_jax.serving.requests.helper_processes import HelperEndedError, HelperProcesses

_NUM_KNOWN = 4096
"""Grammars of which it is remembered that they compile."""

_PATIENCE = 10
"""Seconds on the clock for one of the processor, where others compute too."""

_COMMAND = (sys.executable, "-P", compile_grammar.__file__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarBounds:
    """What compiling one grammar may take.

    Attributes:
      seconds: of a processor.
      memory_bytes: that the compiled grammar and the work on it hold.
      at_once: grammars that are compiled at the same time; others wait for their turn.
      held_bytes: of memory that the compiled grammars of all requests hold together.
    """

    seconds: float = 2.0
    memory_bytes: int = 128 * 2**20
    at_once: int = 2
    held_bytes: int = 2**30


class GrammarsFullError(RuntimeError):
    """The grammars of other requests hold as much memory as they may."""


class GrammarTrials:
    """Compiles grammars in processes of their own, which are ended where it takes too much.

    Nothing in a process can end what llguidance has begun. What has passed here takes the same
    time and memory where it is compiled to be followed. Any thread may come; a process is started
    when it is needed, and goes on with the next grammar.

    Attributes:
      bounds: what a grammar may take.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        end_tokens: Sequence[int],
        bounds: GrammarBounds,
    ) -> None:
        """Starts nothing yet; arguments as those of `read_vocabulary`."""
        greeting = {
            "tokenizer_json": tokenizer_json,
            "vocab_size": vocab_size,
            "end_tokens": list(end_tokens),
        }
        self.bounds = bounds
        self._turns = threading.BoundedSemaphore(bounds.at_once)
        self._helpers = HelperProcesses(_COMMAND, greeting, work="compiles grammars")
        self._known: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def prepare(self) -> None:
        """Starts a process, which reads the tokenizer, before the first grammar comes."""
        self._helpers.prepare()

    def check(self, text: str) -> int:
        """Compiles a grammar, as llguidance has it, and forgets all but the bytes that it holds.

        Raises:
          ValueError: it is no grammar, or compiling it goes beyond a bound; the error names it.
          HelpersClosedError: `close` was called, before it or meanwhile.
          HelperKilledError: somebody else ended the process that compiled it.
          RuntimeError: the program that compiles does not run here.
        """
        digest = hashlib.sha256(text.encode()).digest()
        if (known := self._known.get(digest)) is not None:
            return known
        with self._turns:
            told, held_bytes = self._try(text)
        if told:
            raise ValueError(told)
        self._known[digest] = held_bytes
        while len(self._known) > _NUM_KNOWN:
            self._known.popitem(last=False)
        return held_bytes

    def close(self) -> None:
        """Ends the processes, whatever they compile, and starts no more; from any thread."""
        self._helpers.close()

    def _try(self, text: str) -> tuple[str, int]:
        """What is wrong with a grammar, "" if nothing is, and the bytes that it holds."""
        bounds = self.bounds
        job = {"text": text, "seconds": bounds.seconds, "memory_bytes": bounds.memory_bytes}
        try:
            return self._helpers.ask(job, patience_s=_PATIENCE * bounds.seconds)
        except HelperEndedError as error:
            return self._ended_by(error), 0

    def _ended_by(self, error: HelperEndedError) -> str:
        """What a process has ended by, as the rule that a grammar broke."""
        bounds = self.bounds
        if error.is_late:
            return (
                f"it must compile within {bounds.seconds:g} s of a processor; ask for less, such "
                "as fewer properties, choices and repetitions"
            )
        if error.is_short:
            return (
                f"it must compile within {bounds.memory_bytes // 2**20} MiB of memory; ask for "
                "less, such as fewer properties, choices and repetitions"
            )
        if error.status >= 0:
            raise RuntimeError(
                f"the program that compiles grammars ended with status {error.status}; see why it "
                f"cannot run: {shlex.join(_COMMAND)} < /dev/null"
            )
        return f"it ends the library that compiles it, with signal {-error.status}"
