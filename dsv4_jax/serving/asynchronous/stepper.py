"""Stepper: the one thread that calls an engine."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dsv4_jax.serving.asynchronous.feed import (
    EngineClosedError,
    Feed,
    QueueFullError,
    RequestFailedError,
    SlowReaderError,
    wake,
)
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.engine_core import EngineCore
from dsv4_jax.serving.requests.calls import exclusive_as
from dsv4_jax.serving.requests.request import Token

_log = logging.getLogger(__name__)

MAX_FAILURES = 8
"""Calls that raise in a row before an engine counts as broken; blaming a request takes three."""


class Stepper:
    """Steps an engine while there are requests, and sleeps while there are none.

    Whatever other threads want is a job in a `queue.SimpleQueue`, which even a finalizer may put
    into at any time. Jobs are done between steps.

    Attributes:
      failure: what ended the thread before it was told to end, or None.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int,
        queue_timeout_s: float | None,
        max_unread_tokens: int,
    ) -> None:
        """Starts the thread, which holds the engine until it ends; arguments as of `AsyncEngine`.

        Raises:
          RuntimeError: the engine is in use; no thread was started.
        """
        self.failure: BaseException | None = None
        self._engine = engine
        self._max_waiting = max_waiting
        self._queue_timeout_s = queue_timeout_s
        self._max_unread_tokens = max_unread_tokens
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[int, Feed] = {}
        self._waiting: dict[Feed, None] = {}
        self._changed: dict[Feed, None] = {}
        self._joining = threading.Lock()
        self._is_told_to_stop = False
        self._is_over = threading.Event()
        self._closers: list[asyncio.Future[None]] = []
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="dsv4-jax-engine", daemon=True)
        try:
            _hold(engine, self._thread)
            atexit.register(self.stop_and_join)
            self._thread.start()
        except BaseException:
            self.stop()  # after an interrupt it may run all the same, and then only ends
            self._release()
            raise

    @property
    def is_over(self) -> bool:
        """The thread steps no more."""
        return self._is_over.is_set()

    @property
    def num_waiting(self) -> int:
        """Requests that have had no slot yet."""
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._live) + sum(feed.request_id < 0 for feed in list(self._waiting))

    def submit(self, feeds: Sequence[Feed]) -> None:
        """Queues a request that has been checked, or as many samples of it as there are feeds.

        Raises:
          QueueFullError: too many wait.
          EngineClosedError: the thread has ended, or is about to.
        """
        self._join(feeds, lambda: self._do_submit(feeds))

    def fork(self, feed: Feed, new: Feed, seed: int) -> None:
        """Makes the new feed one of a fork of the other's request; errors as those of `submit`."""
        self._join([new], lambda: self._do_fork(feed, new, seed))

    def cancel(self, feed: Feed) -> None:
        """Ends a request; from any thread, at any time, also by a finalizer."""
        self._jobs.put(lambda: self._do_cancel(feed))

    def look(self, read: Callable[[Engine], Any]) -> concurrent.futures.Future[Any]:
        """What a function makes of the engine between two steps; the function changes nothing."""
        look = _Look(self._engine, read)
        self._jobs.put(look)
        if self._is_over.is_set():
            look.fail(self.failure)
        return look.seen

    def stop(self) -> None:
        """Tells the thread to end, with all requests; as `cancel` from anywhere."""
        self._is_told_to_stop = True
        self._jobs.put(lambda: None)

    def stop_and_join(self) -> None:
        """Waits until the thread has ended, for a step or so."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def stop_and_wait(self) -> None:
        """The same without keeping an event loop waiting."""
        over = asyncio.get_running_loop().create_future()
        self._closers.append(over)
        self.stop()
        if not self._is_over.is_set():
            await over
        self._thread.join()

    def _join(self, feeds: Sequence[Feed], job: Callable[[], None]) -> None:
        with self._joining:
            if len(self._waiting) + len(feeds) > self._max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for a slot, and max_waiting is "
                    f"{self._max_waiting}; try again later"
                )
            if self._is_told_to_stop or self._is_over.is_set():
                raise EngineClosedError("the engine was shut down") from self.failure
            self._waiting.update(dict.fromkeys(feeds))
            self._jobs.put(job)
        if self._is_over.is_set():  # it ended in between, and may not have seen the job
            self._end_all()

    def _run(self) -> None:
        try:
            while not self._is_told_to_stop:
                self._do_jobs()
                if self._live and not self._is_told_to_stop:
                    self._step_engine()
                self._wake_changed()
        except BaseException as error:
            self.failure = error
            _log.critical("the engine has failed and serves no more", exc_info=error)
        finally:
            self._is_over.set()
            self._end_all()
            self._release()
            for over in self._closers:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    over.get_loop().call_soon_threadsafe(_set, over)

    def _release(self) -> None:
        atexit.unregister(self.stop_and_join)
        self._engine.call_lock.release(self._thread)

    def _do_jobs(self) -> None:
        """Does what was wanted since the last step; waits where there is nothing else to do."""
        if not self._live:
            self._jobs.get()()
        for job in self._take_jobs():
            job()

    def _take_jobs(self) -> Iterator[Callable[[], None]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._jobs.get_nowait()

    def _do_submit(self, feeds: Sequence[Feed]) -> None:
        asked = feeds[0].asked
        assert asked is not None
        first = asked.sampling.seed
        seeds = range(first, first + len(feeds))
        self._start(feeds, lambda: self._engine.submit_checked(asked, seeds))

    def _do_fork(self, feed: Feed, new: Feed, seed: int) -> None:
        self._start([new], lambda: [self._engine.fork(max(feed.request_id, 0), seed=seed)])

    def _start(self, feeds: Sequence[Feed], start: Callable[[], list[int]]) -> None:
        try:
            ids = start()
        except Exception as error:
            for feed in feeds:
                self._end(feed, error)
            return
        for feed, request_id in zip(feeds, ids, strict=True):
            feed.request_id = request_id
            self._live[request_id] = feed

    def _do_cancel(self, feed: Feed) -> None:
        if feed.has_ended:
            return
        if feed.request_id >= 0:
            self._engine.cancel(feed.request_id)
        self._end(feed)

    def _step_engine(self) -> None:
        failed_before = self._engine.metrics.finished.get("error", 0)
        try:
            tokens = self._engine.step()
        except Exception as error:
            self._failures += 1
            _log.error("a step raised; the requests go on with the next one", exc_info=error)
            if self._failures >= MAX_FAILURES:
                raise
            return
        self._failures = 0
        self._hand_out(tokens)
        if self._engine.metrics.finished.get("error", 0) != failed_before:
            self._end_failed()
        self._look_at_waiting()

    def _hand_out(self, tokens: Sequence[Token]) -> None:
        """Appends tokens to their feeds."""
        for token in tokens:
            feed = self._live.get(token.request_id)
            if feed is None:
                continue  # somebody else's
            if not feed.is_admitted:
                self._admit(feed)
            if feed.keeps_tokens:
                feed.tokens.append(token)
                self._changed[feed] = None
            if token.finish_reason is not None:
                self._end(feed)
            elif len(feed.tokens) > self._max_unread_tokens:
                self._engine.cancel(feed.request_id)
                self._end(feed, SlowReaderError(f"{len(feed.tokens)} tokens were not read"))

    def _admit(self, feed: Feed) -> None:
        feed.hit_tokens = self._engine.requests[feed.request_id].hit_tokens
        feed.is_admitted = True
        self._waiting.pop(feed, None)

    def _end_failed(self) -> None:
        for feed in list(self._live.values()):
            request = self._engine.requests[feed.request_id]
            if request.finish_reason == "error":
                error = RequestFailedError(f"the request failed: {request.error}")
                error.__cause__ = request.error
                self._end(feed, error)

    def _look_at_waiting(self) -> None:
        """Notes who was admitted, and cancels who has waited for too long; the oldest are first."""
        for feed in list(itertools.islice(self._waiting, len(self._live))):
            request = self._engine.requests.get(feed.request_id)
            if request is None:
                return  # it came a moment ago
            waited = self._engine.loop.clock() - request.submitted_s
            leader = request.leader or request
            if request.admitted_s is not None:
                self._admit(feed)
            elif leader.admitted_s is not None:
                continue  # it comes when its prompt has been read
            elif self._queue_timeout_s is not None and waited > self._queue_timeout_s:
                self._engine.cancel(feed.request_id)
                self._end(feed, QueueFullError(f"no slot was free for {waited:.1f} s"))
            else:
                return

    def _end(self, feed: Feed, error: Exception | None = None) -> None:
        """Takes an ended request out of the engine, and tells its reader."""
        self._waiting.pop(feed, None)
        completion = None
        if self._live.pop(feed.request_id, None) is not None:
            completion = self._engine.completion(feed.request_id)
        feed.end(completion, error)
        self._changed[feed] = None

    def _wake_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for feed in wake(changed):
            self._do_cancel(feed)  # nobody can read it

    def _end_all(self) -> None:
        """Ends whatever is left, when the thread ends."""
        for job in self._take_jobs():  # the feeds of others wait
            if isinstance(job, _Look):
                job.fail(self.failure)
        with self._joining:
            left = [*self._live.values(), *self._waiting]
            self._live.clear()
            self._waiting.clear()
        for feed in left:
            if feed.request_id >= 0:
                with contextlib.suppress(Exception):  # an engine that failed may fail again
                    self._engine.cancel(feed.request_id)
                    feed.completion = self._engine.completion(feed.request_id)
            error = EngineClosedError("the engine was shut down")
            error.__cause__ = self.failure
            if not feed.has_ended:
                feed.end(feed.completion, error)
        wake([*left, *self._changed])
        self._changed.clear()


class _Look:
    """A job that somebody waits for."""

    def __init__(self, engine: Engine, read: Callable[[Engine], Any]) -> None:
        """Of an engine, with a function that is called between steps."""
        self.seen: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._engine = engine
        self._read = read

    def __call__(self) -> None:
        """Looks."""
        try:
            seen = self._read(self._engine)
        except Exception as error:
            self._settle(self.seen.set_exception, error)
        else:
            self._settle(self.seen.set_result, seen)

    def fail(self, cause: BaseException | None) -> None:
        """Nothing can be seen any more."""
        error = EngineClosedError("the engine was shut down")
        error.__cause__ = cause
        self._settle(self.seen.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], how: Any) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            settle(how)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@exclusive_as("another AsyncEngine was made")
def _hold(engine: EngineCore, thread: threading.Thread) -> None:
    """Gives an engine without requests to one thread.

    Raises:
      RuntimeError: a thread holds it already, or requests of another caller have not ended.
    """
    if unfinished := engine.num_unfinished:
        raise RuntimeError(
            f"an AsyncEngine takes an engine without unfinished requests, and {unfinished} of "
            "this one's run or wait; let generate, streams and steps end them, or cancel them"
        )
    engine.call_lock.hold(thread)
