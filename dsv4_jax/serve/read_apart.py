"""Reading bodies in a process of its own: what it takes from nobody else, and can be bounded.

Parsing, checking, rendering and tokenising a body of some megabytes holds Python's lock for a
tenth of a second at a time, and takes a hundred times as much memory as the body has bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from dsv4_jax.serve.body import parse_object
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.reading import Asked, BodyReader, ReaderPlan
from dsv4_jax.serving.requests.compile_grammar import (
    OUT_OF_MEMORY,
    jobs,
    limit_memory,
    start_helper,
)
from dsv4_jax.serving.requests.helper_processes import HelperEndedError, HelperProcesses

_SECONDS = 60
"""Of a processor, for a body. V4's tokenizer reads a megabyte of text within one."""

_PATIENCE_S = 600
"""On the clock, where others compute too."""

_BYTES_OF_ANY = 2**29
_BYTES_OF_EACH = 512
"""Memory that reading may take: of any body, and for each of its bytes, which may be a token."""

_COMMAND = (sys.executable, "-P", "-c", "from dsv4_jax.serve import read_apart; read_apart.main()")


class _Job(NamedTuple):
    """A body.

    Attributes:
      path: where it was sent.
      raw: itself.
      is_logged: its JSON is wanted for the log.
      seconds: of a processor, in which it has to be read.
      most_bytes: of memory that reading may take.
    """

    path: str
    raw: bytes
    is_logged: bool
    seconds: float
    most_bytes: int


class Told(NamedTuple):
    """What a body was read as.

    Attributes:
      found: as of `BodyReader.read`, and packed; None where it was refused.
      refused: why, or None.
      left_out: names of what the model is asked without.
      logged: the body as one line of JSON, if it was wanted.
    """

    found: Asked | bytes | None
    refused: ApiError | None
    left_out: list[str]
    logged: str | None


class ReadersApart:
    """Reads bodies in processes, as many as threads that ask."""

    def __init__(
        self, plan: ReaderPlan, *, seconds: float = _SECONDS, most_bytes: int | None = None
    ) -> None:
        """Starts nothing yet.

        Args:
          plan: for `BodyReader`.
          seconds: of a processor, for a body.
          most_bytes: of memory, for a body; None is what one of its length may need.
        """
        self._seconds, self._most_bytes = seconds, most_bytes
        self.helpers = HelperProcesses(_COMMAND, plan, work="reads bodies of requests")

    def read(self, path: str, raw: bytes, *, is_logged: bool) -> Told:
        """What a process makes of a body.

        Raises:
          ApiError: reading it went beyond a bound.
          HelpersClosedError: the server ends.
          HelperKilledError: somebody else ended the process.
          RuntimeError: the program does not run here, or failed.
        """
        most_bytes = self._most_bytes or _BYTES_OF_ANY + _BYTES_OF_EACH * len(raw)
        job = _Job(path, raw, is_logged, self._seconds, most_bytes)
        try:
            answer = self.helpers.ask(job, patience_s=_PATIENCE_S)
        except HelperEndedError as error:
            raise _refusal_of(error, job) from None
        if isinstance(answer, str):
            raise RuntimeError(f"a process could not read a body:\n{answer}")
        return answer


def _refusal_of(error: HelperEndedError, job: _Job) -> Exception:
    if error.is_late:
        return ApiError(400, f"the body must be read within {job.seconds:g} s of a processor")
    if error.is_short:
        most = job.most_bytes // 2**20
        return ApiError(400, f"the body must be read within {most} MiB of memory")
    if error.status >= 0:
        return RuntimeError(
            f"the program that reads bodies ended with status {error.status}; see why it cannot "
            f"run: {shlex.join(_COMMAND)} < /dev/null"
        )
    return ApiError(400, f"the body ends what reads it, with signal {-error.status}")


def main() -> None:
    """The program."""
    connection = start_helper()
    todo = jobs(connection)
    for plan in todo:
        reader = BodyReader(plan)
        gc.collect()
        gc.freeze()
        gc.disable()  # which would look through all values of a body while they are made
        trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        for answer in _read_all(reader, todo):
            connection.send(answer)
            del answer
            gc.collect()
            if trim is not None:  # glibc would keep most of it
                trim(0)


def _read_all(reader: BodyReader, todo: Iterator[_Job]) -> Iterator[Told | str]:
    for job in todo:
        limit_memory(job.most_bytes)
        signal.setitimer(signal.ITIMER_PROF, job.seconds)  # the end of a process, unhandled
        try:
            answer = _read(reader, job)
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        except Exception:
            answer = traceback.format_exc()
        signal.setitimer(signal.ITIMER_PROF, 0)
        limit_memory(None)
        del job
        yield answer
        del answer


def _read(reader: BodyReader, job: _Job) -> Told:
    left_out: list[str] = []
    logged = None
    try:
        body = parse_object(job.raw)
        if job.is_logged:
            logged = json.dumps(body)
        found = reader.read(job.path, body, left_out)
    except ApiError as error:
        return Told(None, error, left_out, logged)
    return Told(found.pack() if isinstance(found, Asked) else found, None, left_out, logged)
