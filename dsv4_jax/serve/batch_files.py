"""The two files of a batch: requests, one a line, and the answers that are there already."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from dsv4_jax.lines import BLANKS, read_lines
from dsv4_jax.regular_files import open_regular
from dsv4_jax.serve.body import parse_object
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.reading import PATHS
from dsv4_jax.serve.turns.digits import dumps

MAX_ID_CHARS = 512
_FIELDS = {"custom_id", "method", "url", "body"}

_HEAD = b'{"id": "batch_req_'
"""How every answer begins."""


class BatchLine(NamedTuple):
    """A line of the requests.

    Attributes:
      number: of the line, from 1.
      custom_id: what the caller calls it; None where the line has none.
      path: which protocol it speaks.
      body: of the request.
      problem: why it is no request; None if it is one.
    """

    number: int
    custom_id: str | None
    path: str = ""
    body: Mapping[str, Any] = MappingProxyType({})
    problem: str | None = None


class BatchRequests:
    """The file of requests, which is open from its check to its end."""

    def __init__(self, path: pathlib.Path, *, max_bytes: int) -> None:
        """Opens it.

        Args:
          path: a regular file, which is read twice.
          max_bytes: of a line; a longer one is no request.

        Raises:
          ValueError: it is no regular file.
          OSError: it cannot be read.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._file = open_regular(path)

    def lines(self) -> Iterator[BatchLine]:
        """Every line that is not blank."""
        self._file.seek(0)
        for number, raw in enumerate(read_lines(self._file, self._max_bytes), 1):
            if raw is None:
                problem = f"it must have at most {self._max_bytes} bytes"
                yield BatchLine(number, None, problem=problem)
            elif raw.strip(BLANKS):
                yield _read_line(raw, number)

    def check(self) -> dict[str | int, None]:
        """What every line is called: its custom_id, or its number where it has none.

        Raises:
          ValueError: two lines have one custom_id.
        """
        found: dict[str, int] = {}
        names: dict[str | int, None] = {}
        for line in self.lines():
            names[name_of(line)] = None
            if line.custom_id is None:
                continue
            first = found.setdefault(line.custom_id, line.number)
            if first != line.number:
                raise ValueError(
                    f"{self._path}: lines {first} and {line.number} both have the custom_id "
                    f"{json.dumps(line.custom_id)}; give every request one of its own"
                )
        return names

    def close(self) -> None:
        """Closes it."""
        self._file.close()


class BatchAnswers:
    """The file of answers, to which nothing but whole lines are added.

    Attributes:
      done: what the lines are called that have an answer.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the file or makes it, and cuts off a last line that is not whole.

        Raises:
          ValueError: it holds something else, or is no regular file.
          OSError: it cannot be read and written, or another process writes it.
        """
        self._path = path
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self._lock()
            self.done: dict[str | int, None] = {}
            self._size = self._read()
            if self._size < os.fstat(self._file.fileno()).st_size:
                os.ftruncate(self._file.fileno(), self._size)
        except BaseException:
            self._file.close()
            raise

    def add(self, answer: dict[str, Any]) -> None:
        """Writes one line, or nothing of it.

        Raises:
          OSError: the disk is full, or fails.
        """
        left = memoryview(dumps(answer).encode() + b"\n")
        size = self._size + len(left)
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
            raise self._failure(error) from None
        self._size = size

    def close(self) -> None:
        """Makes sure that the lines are on the disk.

        Raises:
          OSError: they are not.
        """
        with self._file:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._failure(error) from None

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes it; what went wrong before is what is said."""
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self.close()

    def _failure(self, error: OSError) -> OSError:
        told = f"{self._path} cannot be written: {error.strerror}; the answers before are in it, "
        return OSError(f"{told}and the same command goes on from there")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process writes {self._path}") from None

    def _read(self) -> int:
        """Notes what is done; the bytes of all whole lines."""
        size = 0
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n") and raw[: len(_HEAD)] == _HEAD[: len(raw)]:
                break  # it was torn
            size += len(raw)
            if not raw.strip(BLANKS):
                continue
            name = _name_of_answer(raw)
            if name is None:
                raise ValueError(
                    f"{self._path}: line {number} is no answer of a batch; name another file, or "
                    "move this one away"
                )
            self.done[name] = None
        return size


def name_of(line: BatchLine) -> str | int:
    """What a line is called in `BatchAnswers.done`."""
    return line.number if line.custom_id is None else line.custom_id


def _name_of_answer(raw: bytes) -> str | int | None:
    """What an answered line is called; None if this is no answer."""
    try:
        answer = json.loads(raw)
        name = answer["custom_id"]
        name = answer["error"]["line"] if name is None else name
        return name if type(name) in (str, int) and "response" in answer else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _read_line(raw: bytes, number: int) -> BatchLine:
    try:
        line = parse_object(raw, "it")
    except ApiError as error:
        return BatchLine(number, None, problem=error.message)
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        problem = f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters"
        return BatchLine(number, None, problem=problem)
    path, body = line.get("url"), line.get("body")
    problem = None
    if line.get("method") != "POST":
        problem = "method must be POST"
    elif path not in PATHS:
        problem = f"url must be one of {', '.join(PATHS)}"
    elif not isinstance(body, dict):
        problem = "body must be an object"
    elif unknown := sorted(line.keys() - _FIELDS):
        problem = f"{json.dumps(unknown[0])[:64]} is no field of a line"
    if problem is not None:
        return BatchLine(number, custom_id, problem=problem)
    assert isinstance(path, str)
    assert isinstance(body, dict)
    return BatchLine(number, custom_id, path, body)
