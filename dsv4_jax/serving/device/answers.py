"""Answers: what processes say of moves of pages that process 0 has told them of.

A move takes each process its own time, and may fail in one of them. Process 0 alone decides what
follows, once all have answered: so all of them go on with the same. Nothing is sent and nothing
waited for while no move is under way.

    process 0 tells of move n ──> each process moves its part, in a thread
                                  each one answers: n, damaged rows, what went wrong
    a future is done           <── when all have answered
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dsv4_jax.hosts import Hosts

MOST_UNANSWERED = 32
"""Moves; who begins another waits."""


class Answer(NamedTuple):
    """What a process said of a move: damaged rows (slab, row), and what went wrong, or nothing."""

    process: int
    damaged: list[tuple[int, int]]
    wrong: str


@dataclasses.dataclass(eq=False)
class _Move:
    future: concurrent.futures.Future[Any]
    conclude: Callable[[Sequence[Answer]], Any]
    missing: set[int]
    answers: list[Answer]


class Answers:
    """Moves of which not every process has answered; used by process 0."""

    def __init__(self, hosts: Hosts) -> None:
        """Listens only while there are any."""
        self._hosts = hosts
        self._moves: dict[int, _Move] = {}
        self._changed = threading.Condition()
        self._listeners: list[threading.Thread] = []
        self._is_closed = False

    def report(self, move: int, damaged: Sequence[tuple[int, int]], wrong: str) -> None:
        """What this process says, whichever it is; any thread may call it."""
        if self._hosts.number:
            self._hosts.answer(json.dumps([move, list(damaged), wrong]).encode())
        else:
            self._note(move, Answer(0, list(damaged), wrong))

    def expect[T](
        self, conclude: Callable[[Sequence[Answer]], T]
    ) -> tuple[int, concurrent.futures.Future[T]]:
        """The number of a new move, before others are told of it, and what it will have come to.

        Args:
          conclude: makes that of the answers of all processes, in order; it may raise.
        """
        number, future = self._hosts.next_number(), concurrent.futures.Future[T]()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._changed.wait_for(lambda: len(self._moves) < MOST_UNANSWERED)
            self._moves[number] = _Move(future, conclude, set(range(self._hosts.count)), [])
            self._changed.notify_all()
        while len(self._listeners) < self._hosts.count - 1:
            other = len(self._listeners) + 1
            thread = threading.Thread(target=self._listen, args=(other,), daemon=True)
            self._listeners.append(thread)
            thread.start()
        return number, future

    def forget(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these moves any more."""
        with self._changed:
            for number in numbers:
                self._moves.pop(number, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits for any."""
        with self._changed:
            self._is_closed = True
            self._moves.clear()
            self._changed.notify_all()

    def _listen(self, other: int) -> None:
        def is_awaited() -> bool:
            return any(other in move.missing for move in self._moves.values())

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or is_awaited())
                if self._is_closed:
                    return
            message = self._hosts.hear_answer(other)
            if message is None:
                return
            move, damaged, wrong = json.loads(message)
            self._note(move, Answer(other, [(slab, row) for slab, row in damaged], wrong))

    def _note(self, number: int, answer: Answer) -> None:
        with self._changed:
            move = self._moves.get(number)
            if move is None:
                return
            move.missing.discard(answer.process)
            move.answers.append(answer)
            if move.missing:
                return
            del self._moves[number]
            self._changed.notify_all()
        try:
            move.future.set_result(move.conclude(sorted(move.answers)))
        except BaseException as error:
            move.future.set_exception(error)
