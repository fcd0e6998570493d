"""Answer: reads the streams of a request, and sends what a renderer makes of their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from starlette.types import Receive, Scope, Send

from dsv4_jax.serve.errors import ApiError, as_api_error
from dsv4_jax.serve.record import Record
from dsv4_jax.serving.async_engine import AsyncStream, read_batches
from dsv4_jax.serving.request import Completion, Token


class Renderer(Protocol):
    """Tokens to the bytes of one protocol; an answer calls it in this order.

    A renderer that streams gives events, one that does not gives nothing before `whole`.
    """

    streams: bool

    def start(self, hit_tokens: int) -> bytes:
        """What comes before the first token."""
        ...

    def tokens(self, number: int, tokens: list[Token]) -> bytes:
        """What new tokens of a stream add."""
        ...

    def is_done(self, number: int) -> bool:
        """Nothing more is wanted of a stream, such as after a stop text."""
        ...

    def end(self, completions: Sequence[Completion]) -> bytes:
        """What comes after the last token; of a renderer that does not stream, the whole answer."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The event of an error in the middle of a stream."""
        ...


class Answer:
    """An answer, as an ASGI application.

    The first token is there before anything is sent, so that a request that finds no slot gets a
    status of its own. A client that goes cancels what was submitted for it.
    """

    def __init__(self, streams: Sequence[AsyncStream], renderer: Renderer, record: Record) -> None:
        """Of requests that were submitted."""
        self._streams = streams
        self._renderer = renderer
        self._record = record
        self._has_started = False
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        watch = asyncio.create_task(self._cancel_if_gone(receive))
        try:
            await self._run(send, scope["send_part"])
        except Exception as error:
            if not self._has_started or not self._renderer.streams:
                raise as_api_error(error) from error
            self._record.details["error"] = type(error).__name__
            await _send_part(send, self._renderer.failed(as_api_error(error)), more=False)
        finally:
            watch.cancel()
            self._cancel()

    async def _run(self, send: Send, send_part: Send) -> None:
        renderer, record = self._renderer, self._record
        async for number, tokens in read_batches(self._streams):
            part = b""
            if record.first_token_s is None:
                record.first_token_s = time.perf_counter()
                part = renderer.start(self._streams[number].hit_tokens)
                await self._start(send)
            part += renderer.tokens(number, tokens)
            if part:
                await _send_part(send_part, part)
            if renderer.is_done(number):
                self._streams[number].cancel()
        completions = [await stream.completion() for stream in self._streams]
        record.details["finish"] = [
            "stop" if renderer.is_done(number) else done.finish_reason
            for number, done in enumerate(completions)
        ]
        record.count(
            prompt_tokens=completions[0].prompt_tokens,
            hit_tokens=completions[0].hit_tokens,
            drawn_tokens=sum(len(done.token_ids) for done in completions),
        )
        if record.first_token_s is None:
            return  # cancelled before its first token: nobody is there
        body = renderer.end(completions)
        self._is_whole = True
        if renderer.streams:
            await _send_part(send, body, more=False)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, body, more=False)

    async def _start(self, send: Send) -> None:
        if self._renderer.streams:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _cancel_if_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_whole:
            self._record.details["gone"] = True
            self._cancel()

    def _cancel(self) -> None:
        for stream in self._streams:
            if not stream.has_ended:
                stream.cancel()


async def read_whole(streams: Sequence[AsyncStream], renderer: Renderer) -> list[Completion]:
    """Feeds a renderer that does not stream, up to what its `end` takes.

    Errors are those of `read_batches`.
    """
    has_started = False
    async for number, tokens in read_batches(streams):
        if not has_started:
            has_started = True
            renderer.start(streams[number].hit_tokens)
        renderer.tokens(number, tokens)
        if renderer.is_done(number):
            streams[number].cancel()
    return [await stream.completion() for stream in streams]


async def _send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
