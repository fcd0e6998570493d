"""Bodies on their way: who reads them, so that no other request waits for a large one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from dsv4_jax.serve.body import parse_object
from dsv4_jax.serve.errors import as_api_error
from dsv4_jax.serve.read_apart import ReadersApart
from dsv4_jax.serve.reading import Asked, BodyReader
from dsv4_jax.serve.record import Record
from dsv4_jax.serve.threads import Threads

_LONG_BYTES = 2**12
"""Of a body; the text of a longer one takes milliseconds to be tokenised."""

_LARGE_BYTES = 2**16
"""Of a body; a larger one is read in a process of its own."""

_HUGE_BYTES = 2**20
"""Of a body; a larger one takes seconds, for which those that are smaller do not wait."""

_FORMS = frozenset({"tools", "response_format", "text", "output_config"})
"""Fields that may give the answer a form, which is read for milliseconds and more."""

_NUM_THREADS, _NUM_PROCESSES = 2, 2
"""Bodies that are read at a time, besides a huge one."""


class Bodies:
    """Reads bodies: small ones at once, longer ones in threads, and large ones in processes."""

    def __init__(self, reader: BodyReader) -> None:
        """Starts nothing yet."""
        self._reader = reader
        self._logs = reader.plan.settings.log_prompts
        self._threads = Threads("bodies", _NUM_THREADS)
        self._large = Threads("large bodies", _NUM_PROCESSES)
        self._huge = Threads("huge bodies", 1)
        self._apart = ReadersApart(reader.plan)

    async def read(self, path: str, raw: bytes, record: Record) -> Asked | bytes:
        """What a body asks for, or the answer; arguments and errors as of `BodyReader.read`."""
        if len(raw) > _LARGE_BYTES:
            threads = self._huge if len(raw) > _HUGE_BYTES else self._large
            return await threads.run(self._read_apart, path, raw, record)
        if len(raw) > _LONG_BYTES:
            return await self._threads.run(
                lambda: self._read(path, self._parse(raw, record), record)
            )
        body = self._parse(raw, record)
        if _FORMS.isdisjoint(body):
            return self._read(path, body, record)
        return await self._threads.run(self._read, path, body, record)

    def prepare(self) -> None:
        """Starts a process, before the first large body comes, if there can be any."""
        if self._reader.plan.settings.max_body_bytes > _LARGE_BYTES:
            self._large.begin(self._apart.helpers.prepare)

    def stop(self) -> None:
        """Ends what is read in processes, and begins no more of it."""
        self._apart.helpers.close()

    def close(self) -> None:
        """Ends its threads and processes."""
        self.stop()
        for threads in (self._threads, self._large, self._huge):
            threads.close()

    def _parse(self, raw: bytes, record: Record) -> dict[str, Any]:
        body = parse_object(raw)
        if self._logs:
            record.details["body"] = body
        return body

    def _parse_and_read(self, path: str, raw: bytes, record: Record) -> Asked | bytes:
        return self._read(path, self._parse(raw, record), record)

    def _read(self, path: str, body: dict[str, Any], record: Record) -> Asked | bytes:
        with _noting(record) as left_out:
            return self._reader.read(path, body, left_out)

    def _read_apart(self, path: str, raw: bytes, record: Record) -> Asked | bytes:
        try:
            told = self._apart.read(path, raw, is_logged=self._logs)
        except Exception as error:
            raise as_api_error(error) from error
        record.body = told.logged
        with _noting(record) as left_out:
            left_out += told.left_out
            if told.refused is not None:
                raise told.refused
        assert told.found is not None
        return told.found


@contextlib.contextmanager
def _noting(record: Record) -> Iterator[list[str]]:
    """A list of what a model is asked without, which the log is told, also of what is refused."""
    left_out: list[str] = []
    try:
        yield left_out
    finally:
        if left_out:
            record.details["left_out"] = left_out
