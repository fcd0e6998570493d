"""Batch: a file of requests, answered without HTTP by what answers them in the server."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Self

from dsv4_jax.serve.answer import read_whole
from dsv4_jax.serve.batch_files import BatchAnswers, BatchLine, BatchRequests, name_of
from dsv4_jax.serve.errors import as_api_error, refuse
from dsv4_jax.serve.intake import Intake
from dsv4_jax.serve.repeatable import FileOrder, seed_of, settle
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serve.turns import digits
from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine
from dsv4_jax.serving.engine import Engine


class Batch:
    """What is left to do of a file of requests.

    Attributes:
      num_left: lines without an answer.
      has_names: a line has a custom_id, without which it is no request.
      num_done: lines with one.
    """

    def __init__(
        self,
        requests: pathlib.Path,
        answers: pathlib.Path,
        *,
        settings: ServeSettings,
        repeatable: bool = False,
    ) -> None:
        """Reads both files, and mends the answers.

        Args:
          requests: in the batch format of OpenAI: `custom_id`, `method`, `url` and `body` a line.
          answers: what is there already is not done again; a last line that is torn is cut off.
          settings: what is allowed.
          repeatable: answers are written in the order of their lines, with seeds and ids by what
            their lines are called and times of 0; prefixes are shared within a line alone.

        Raises:
          ValueError: two requests have one custom_id, a file is no regular one, both are one, or
            the answers are none.
          OSError: a file cannot be opened, or another process writes the answers.
        """
        self._settings, self._repeatable = settings, repeatable
        if answers.exists() and answers.samefile(requests):
            raise ValueError(f"the answers need a file of their own, and {answers} has requests")
        self._requests = BatchRequests(requests, max_bytes=settings.max_body_bytes)
        try:
            names = self._requests.check()
            self._answers = BatchAnswers(answers)
        except BaseException:
            self._requests.close()
            raise
        self._done = self._answers.done
        self.num_done = len(names.keys() & self._done.keys())
        self.num_left = len(names) - self.num_done
        self.has_names = any(isinstance(name, str) for name in names)

    def run(self, engine: Engine, on_answer: Callable[[bool], None] = lambda good: None) -> None:
        """Answers what has no answer; as many requests run at once as the engine has slots for.

        Args:
          engine: serves nobody else meanwhile.
          on_answer: is told of each line whether it was served.

        Raises:
          OSError: the answers cannot be written; those before are whole.
          ValueError: the engine failed for good.
        """
        num_slots = engine.plan.pools.max_requests * engine.plan.data_shards
        num_workers = min(2 * num_slots, self.num_left)
        if num_workers:
            asyncio.run(self._run(engine, num_workers, on_answer))

    async def _run(self, engine: Engine, num_workers: int, on_answer: Callable) -> None:
        left = (line for line in self._requests.lines() if name_of(line) not in self._done)
        lines, order = enumerate(left), FileOrder() if self._repeatable else None
        most = num_workers * self._settings.max_choices
        try:
            async with AsyncEngine(engine, max_waiting=most) as shared:
                with contextlib.closing(Intake(shared, self._settings)) as intake:
                    async with asyncio.TaskGroup() as all_:
                        for _ in range(num_workers):
                            all_.create_task(self._work(intake, lines, order, on_answer))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _work(
        self,
        intake: Intake,
        lines: Iterator[tuple[int, BatchLine]],
        order: FileOrder | None,
        on_answer: Callable,
    ) -> None:
        for index, line in lines:
            answer = await _answer(intake, line, self._repeatable)
            if order is not None:
                settle(answer, name_of(line))
                await order.wait_for(index)
            self._answers.add(answer)
            if order is not None:
                await order.note_written()
            on_answer(answer["response"] is not None and answer["response"]["status_code"] == 200)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes both files."""
        self._requests.close()
        self._answers.__exit__(kind)


async def _answer(intake: Intake, line: BatchLine, repeatable: bool) -> dict[str, Any]:
    """The line of an answer."""
    answer = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id}
    if line.problem is not None:
        told = f"line {line.number} is no request: {line.problem}"
        error = {"code": "invalid_line", "message": told, "param": None, "line": line.number}
        return answer | {"response": None, "error": error}
    request_id = f"req_{secrets.token_hex(12)}"
    try:
        body, status = await _draw(intake, line, repeatable), 200
    except Exception as error:
        refused = as_api_error(error)
        if refused.status == 503:
            raise ValueError(f"the engine has failed: {_reason(error)}") from error
        body, status = refused.for_path(line.path, request_id), refused.status
    response = {"status_code": status, "request_id": request_id, "body": digits.loads(body)}
    return answer | {"response": response, "error": None}


def _reason(error: BaseException) -> BaseException:
    """What an exception goes back to."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


async def _draw(intake: Intake, line: BatchLine, repeatable: bool) -> bytes:
    """The whole answer of a protocol."""
    if line.body.get("stream"):
        refuse("stream", "must be false in a batch")
    key, seed = (line.number, seed_of(name_of(line))) if repeatable else (-1, None)
    streams, renderer = intake.start(line.path, line.body, key=key, seed=seed)
    try:
        return renderer.end(await read_whole(streams, renderer))
    finally:
        for stream in streams:
            if not stream.has_ended:
                stream.cancel()
