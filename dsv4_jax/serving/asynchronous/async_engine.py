"""AsyncEngine: one thread steps an engine, and any number of coroutines read its tokens."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, Unpack

from dsv4_jax import checks
from dsv4_jax.serving.asynchronous.feed import EngineClosedError, Feed, RequestFailedError
from dsv4_jax.serving.asynchronous.stepper import Stepper
from dsv4_jax.serving.engine import MAX_SAMPLES, Engine
from dsv4_jax.serving.engine_state import read_state
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.requests.request import Completion, Token
from dsv4_jax.step.sampling import SamplingFields, SamplingParams

MAX_COUNT = 2**24
"""The most requests that may wait, and tokens that may be unread."""

DEFAULT_MAX_WAITING = 256
_MAX_SECONDS = 1e9


class AsyncEngine:
    """An engine for coroutines and threads.

    Its thread is the only one that steps. `submit`, `fork` and `cancel` come from any thread, never
    wait for a step, and take effect before the next one. A step that raises ends only the requests
    that make steps raise; `EngineCore.step` says how they are found. A reader that is slow, gone or
    on a closed event loop delays nobody: its request is cancelled.

    Use it with `async with`, or call `aclose` or `close`; it also ends when it is dropped together
    with its streams, and at the end of the process. Until then the engine is its alone: other calls
    of it raise `RuntimeError` and touch nothing. After that it can be used as before.

    Attributes:
      engine: the engine that it steps.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = DEFAULT_MAX_WAITING,
        queue_timeout_s: float | None = None,
        max_unread_tokens: int = 4096,
    ) -> None:
        """Starts the thread.

        Args:
          engine: what it steps; call its `warmup` before, or the first steps compile.
          max_waiting: requests without a slot, beyond which `submit` and `fork` refuse.
          queue_timeout_s: seconds without a slot after which a request is cancelled; None is never.
          max_unread_tokens: tokens of a stream that nobody reads before it is cancelled.

        Raises:
          ValueError: an argument is of another type or out of range.
          RuntimeError: another `AsyncEngine` holds the engine, a call of it is in progress, or it
            has unfinished requests.
        """
        self.engine = checks.instance("engine", engine, Engine)
        self._has_server = False
        max_waiting = checks.integer("max_waiting", max_waiting, 1, MAX_COUNT)
        max_unread = checks.integer("max_unread_tokens", max_unread_tokens, 1, MAX_COUNT)
        if queue_timeout_s is not None:
            queue_timeout_s = checks.number("queue_timeout_s", queue_timeout_s, 0, _MAX_SECONDS)
        self._stepper = Stepper(
            engine,
            max_waiting=max_waiting,
            queue_timeout_s=queue_timeout_s,
            max_unread_tokens=max_unread,
        )
        weakref.finalize(self, self._stepper.stop).atexit = False

    @property
    def metrics(self) -> Metrics:
        """The engine's counters."""
        return self.engine.metrics

    @property
    def is_serving(self) -> bool:
        """It takes requests; false after `close`, and where the engine failed for good."""
        return not self._stepper.is_over

    @property
    def num_waiting(self) -> int:
        """Requests that have had no slot yet."""
        return self._stepper.num_waiting

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return self._stepper.num_unfinished

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        salt: str = "",
        speculate: bool = True,
        **fields: Unpack[SamplingFields],
    ) -> AsyncStream:
        """Queues a request; arguments as those of `Engine.submit`.

        Raises:
          ValueError: as `Engine.submit`; nothing was queued.
          QueueFullError: `max_waiting` requests wait.
          EngineClosedError: it was shut down.
        """
        return self.submit_many(
            prompt, 1, sampling=sampling, salt=salt, speculate=speculate, **fields
        )[0]

    def submit_many(
        self,
        prompt: str | Sequence[int],
        n: int,
        *,
        sampling: SamplingParams | None = None,
        salt: str = "",
        speculate: bool = True,
        **fields: Unpack[SamplingFields],
    ) -> list[AsyncStream]:
        """Queues n samples of one prompt, which is read once; of seed s they have s, s + 1, ...

        Arguments are those of `Engine.submit_many`, with one seed. Errors are those of `submit`.
        """
        n = checks.integer("n", n, 1, MAX_SAMPLES)
        asked = self.engine.limits.check_request(prompt, sampling, salt, speculate, fields)
        feeds = [Feed(asked) for _ in range(n)]
        self._stepper.submit(feeds)
        return [AsyncStream(self, self._stepper, feed) for feed in feeds]

    def serve_with(self) -> None:
        """Notes that a server answers with it, which closes it at its end.

        Raises:
          EngineClosedError: it was shut down.
          RuntimeError: another server answers with it.
        """
        if not self.is_serving:
            raise EngineClosedError(
                "engine must not have been closed, as a server that ends closes its own; make a "
                "new AsyncEngine"
            )
        if self._has_server:
            raise RuntimeError(
                "engine must be of no other Server, which would close it under this one; close it, "
                "and give the new server a new AsyncEngine"
            )
        self._has_server = True

    async def state(self) -> dict[str, Any]:
        """What the engine holds between two steps: `read_state` of `serving.engine_state`.

        Raises:
          EngineClosedError: it was shut down.
        """
        return await asyncio.wrap_future(self._stepper.look(read_state))

    def stop(self) -> None:
        """Tells the thread to cancel all requests and end, and returns at once."""
        self._stepper.stop()

    def close(self) -> None:
        """Cancels all requests and ends the thread; waits for the step in progress."""
        self._stepper.stop_and_join()

    async def aclose(self) -> None:
        """The same without keeping the event loop waiting."""
        await self._stepper.stop_and_wait()

    async def __aenter__(self) -> Self:
        """Closes it at the end of an `async with`."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        await self.aclose()

    def __enter__(self) -> Self:
        """Closes it at the end of a `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()


class AsyncStream(AsyncIterator[Token]):
    """One request's tokens, for one coroutine at a time; `AsyncEngine.submit` makes it.

    If it is dropped before its end, the request is cancelled.

    Attributes:
      feed: where the thread leaves the tokens.
    """

    def __init__(self, owner: AsyncEngine, stepper: Stepper, feed: Feed) -> None:
        """Of a request that was queued.

        Args:
          owner: whose engine serves it, and lives as long as this.
          stepper: the thread.
          feed: where the thread leaves the tokens.
        """
        self._owner = owner
        self._stepper = stepper
        self.feed = feed

    @property
    def is_admitted(self) -> bool:
        """The request has had a slot."""
        return self.feed.is_admitted

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prompt that were in the cache when it was admitted; 0 before."""
        return self.feed.hit_tokens

    @property
    def has_ended(self) -> bool:
        """The request is over; tokens may be left to read."""
        return self.feed.has_ended

    async def __anext__(self) -> Token:
        """The next token.

        Raises:
          StopAsyncIteration: the request has ended, or was cancelled.
          QueueFullError: it waited for a slot for too long.
          SlowReaderError: its tokens were not read for too long; those that were kept came before.
          RequestFailedError: a step, the tokenizer or a stop text raised for its sake.
          EngineClosedError: the engine was shut down.
        """
        tokens = self.feed.tokens
        if not tokens and not await self._wait():
            raise StopAsyncIteration
        return tokens.popleft()

    async def batch(self) -> list[Token]:
        """All tokens that came since the last call, at least one; none at the end.

        Errors are those of `__anext__`.
        """
        if not self.feed.tokens and not await self._wait():
            return []
        return self.feed.take()

    async def completion(self) -> Completion:
        """What the request got, when it has ended; tokens that were not read are dropped.

        Raises:
          QueueFullError, SlowReaderError, EngineClosedError: as `__anext__`. A step that failed is
            no error here: the completion has it.
        """
        feed = self.feed
        feed.keeps_tokens = False
        while not feed.has_ended:
            feed.tokens.clear()
            await self._wait()
        feed.tokens.clear()
        if feed.error is not None and not isinstance(feed.error, RequestFailedError):
            raise feed.error
        return feed.completion or Completion([], None, "cancelled")

    def fork(self, *, seed: int) -> AsyncStream:
        """A second request that goes on from what this one has drawn when the next step begins.

        Its stream gives what it draws from there on; its completion has what came before, too. If
        the request has ended by then, the stream raises `ValueError`.

        Raises:
          ValueError: the seed is no integer.
          QueueFullError: `max_waiting` requests wait.
          EngineClosedError: the engine was shut down.
        """
        seed = checks.integer("seed", seed, high=None)
        new = Feed(None)
        self._stepper.fork(self.feed, new, seed)
        return AsyncStream(self._owner, self._stepper, new)

    def cancel(self) -> None:
        """Ends the request before the next step; what was drawn can still be read."""
        self._stepper.cancel(self.feed)

    async def _wait(self) -> bool:
        """Waits for tokens or the end; whether there are tokens."""
        feed = self.feed
        if feed.waiter is not None:
            raise RuntimeError("one coroutine at a time reads a stream, and another one waits")
        while not feed.tokens and not feed.has_ended:
            waiter = asyncio.get_running_loop().create_future()
            feed.waiter = waiter
            try:
                if not feed.tokens and not feed.has_ended:
                    await waiter
            finally:
                if feed.waiter is waiter:
                    feed.waiter = None
        if not feed.tokens and feed.keeps_tokens and feed.error is not None:
            raise feed.error
        return bool(feed.tokens)

    async def __aenter__(self) -> Self:
        """Cancels the request at the end of an `async with`, if it has not ended."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels it."""
        self.cancel()

    def __del__(self) -> None:
        """Any thread may come here, and at any time."""
        feed = getattr(self, "feed", None)
        if feed is not None and not feed.has_ended:
            self._stepper.cancel(feed)


async def read_batches(streams: Sequence[AsyncStream]) -> AsyncIterator[tuple[int, list[Token]]]:
    """Tokens of several streams as they come: the number of a stream, and its new tokens.

    One coroutine reads them all, so that a step wakes it once. Errors are those of a stream; the
    first one ends this.
    """
    if len(streams) == 1:  # as nearly all are
        while tokens := await streams[0].batch():
            yield 0, tokens
        return
    left = dict(enumerate(streams))
    while left:
        waiter = asyncio.get_running_loop().create_future()
        feeds = [stream.feed for stream in left.values()]
        for feed in feeds:
            feed.waiter = waiter
        try:
            if not any(feed.tokens or feed.has_ended for feed in feeds):
                await waiter
        finally:
            for feed in feeds:
                feed.waiter = None
        for number, stream in list(left.items()):
            is_last = stream.feed.has_ended  # asked first: what comes before the end is there then
            if tokens := stream.feed.take():
                yield number, tokens
            elif is_last:
                del left[number]
                if stream.feed.error is not None:
                    raise stream.feed.error
