"""Feed: what the thread that steps an engine leaves for the coroutine that reads a request."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable

from dsv4_jax.serving.requests.prompts import CheckedRequest
from dsv4_jax.serving.requests.request import Completion, Token


class EngineClosedError(RuntimeError):
    """The engine was shut down, or failed for good; the cause, if any, is chained."""


class QueueFullError(RuntimeError):
    """A request was not admitted: too many wait, or it has waited too long."""


class SlowReaderError(RuntimeError):
    """Nobody read a request's tokens for so long that it was cancelled."""


class RequestFailedError(RuntimeError):
    """A step raised for this request's sake; others went on."""


class Feed:
    """One request between two threads.

    The thread that steps appends tokens and then looks for a waiter; the reader becomes the waiter
    and then looks for tokens. So one of them sees the other, and no lock is needed: an attribute is
    one store, and a deque appends and pops at once.

    Attributes:
      asked: the checked request; None for a fork.
      request_id: what the engine gave; -1 before it is there.
      tokens: drawn and not read.
      keeps_tokens: false where only the end is of interest.
      is_admitted: it has had a slot.
      hit_tokens: tokens of the prompt that were in the cache then.
      waiter: whom the next token wakes, or None.
      completion: what the request got, once it has ended; None also where it never was there.
      error: what the reader is told at the end, or None.
      has_ended: nothing comes any more; the last attribute to be set.
    """

    __slots__ = (
        "asked",
        "completion",
        "error",
        "has_ended",
        "hit_tokens",
        "is_admitted",
        "keeps_tokens",
        "request_id",
        "tokens",
        "waiter",
    )

    def __init__(self, asked: CheckedRequest | None) -> None:
        """Of a request that is on its way to the engine."""
        self.asked = asked
        self.request_id = -1
        self.tokens: collections.deque[Token] = collections.deque()
        self.keeps_tokens = True
        self.is_admitted = False
        self.hit_tokens = 0
        self.waiter: asyncio.Future[None] | None = None
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self.has_ended = False

    def take(self) -> list[Token]:
        """The tokens that nobody has read, which are read now."""
        if len(self.tokens) == 1:
            return [self.tokens.popleft()]
        return [self.tokens.popleft() for _ in range(len(self.tokens))]

    def end(self, completion: Completion | None, error: Exception | None = None) -> None:
        """Says that nothing comes any more."""
        self.completion, self.error = completion, error
        self.has_ended = True


def wake(feeds: Iterable[Feed]) -> list[Feed]:
    """Wakes the readers of feeds, by one call for each event loop.

    Returns:
      Feeds whose loop is closed: nobody will read them.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Feed, asyncio.Future[None]]]] = {}
    for feed in feeds:
        waiter = feed.waiter
        if waiter is not None:
            feed.waiter = None
            by_loop.setdefault(waiter.get_loop(), []).append((feed, waiter))
    unread: list[Feed] = []
    for loop, woken in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, [waiter for _, waiter in woken])
        except RuntimeError:
            unread += [feed for feed, _ in woken]
    return unread


def _set_all(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
