"""Answer: reads the streams of a request, and sends what a renderer makes of their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from dsv4_jax.serve.errors import ApiError, as_api_error
from dsv4_jax.serve.record import Record
from dsv4_jax.serve.room import Share
from dsv4_jax.serving.asynchronous.async_engine import AsyncStream, read_batches
from dsv4_jax.serving.requests.request import Completion, Token

_PART_BYTES = 2**18
"""Of an answer that is sent in parts."""

_COMMENT = b": the request waits or is being worked on\n\n"
"""A line that every reader of server-sent events skips."""

_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""What Anthropic's protocol has for it."""


class Renderer(Protocol):
    """Tokens to the bytes of one protocol; an answer calls it in this order.

    A renderer that streams gives events, one that does not gives nothing before `whole`.

    Attributes:
      streams: it gives events.
      n: answers to each prompt, which stand together.
    """

    streams: bool
    n: int

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


class PlainAnswer:
    """An answer in JSON that is there, as an ASGI application; it is held until it is sent."""

    def __init__(self, body: bytes, share: Share) -> None:
        """Of a body, and of what it takes up."""
        self._body = body
        self._share = share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, a part at a time as the client reads."""
        with self._share:
            await send(_head_of(self._body))
            parts = range(0, max(1, len(self._body)), _PART_BYTES)
            for start in parts:
                part = self._body[start : start + _PART_BYTES]
                await _send_part(send, part, more=start != parts[-1])


class Answer:
    """An answer, as an ASGI application.

    A whole answer has a status of its own where its request finds no slot. A stream begins with
    status 200 when its first token is there, or when nothing was sent for `pulse_s` seconds, as
    where it waits for a slot or for a long prompt: then, and as often again, it sends what the
    protocol has for a sign of life, so that neither the client nor a proxy gives it up. What fails
    from there on is an event. A client that goes cancels what was submitted for it.
    """

    def __init__(
        self,
        streams: Sequence[AsyncStream],
        renderer: Renderer,
        record: Record,
        *,
        pulse_s: float = 2.0,
    ) -> None:
        """Of requests that were submitted."""
        self._streams = streams
        self._renderer = renderer
        self._record = record
        self._pulse_s = pulse_s
        self._sent_s = 0.0  # on the event loop's clock
        self._starting = asyncio.Lock()
        self._has_started = False
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        watch = asyncio.create_task(self._cancel_if_gone(receive))
        pulse = None
        if self._renderer.streams:
            self._sent_s = asyncio.get_running_loop().time()
            pulse = asyncio.create_task(self._show_life(send, scope["send_part"], scope["path"]))
        try:
            await self._run(send, scope["send_part"], pulse)
        except Exception as error:
            if pulse is not None:
                pulse.cancel()  # before it starts a stream, or sends after the end of one
            if not self._has_started or not self._renderer.streams:
                raise as_api_error(error) from error
            self._record.details["error"] = type(error).__name__
            await _send_part(send, self._renderer.failed(as_api_error(error)), more=False)
        finally:
            watch.cancel()
            if pulse is not None:
                pulse.cancel()
            self._cancel()

    async def _run(self, send: Send, send_part: Send, pulse: asyncio.Task[None] | None) -> None:
        renderer, record = self._renderer, self._record
        clock = asyncio.get_running_loop().time
        async for number, tokens in read_batches(self._streams):
            part = b""
            if record.first_token_s is None:
                record.first_token_s = time.perf_counter()
                part = renderer.start(self._streams[number].hit_tokens)
                await self._start(send)
            part += renderer.tokens(number, tokens)
            if part:
                self._sent_s = clock()
                await _send_part(send_part, part)
            if renderer.is_done(number):
                self._streams[number].cancel()
        completions = [await stream.completion() for stream in self._streams]
        record.details["finish"] = [
            "stop" if renderer.is_done(number) else done.finish_reason
            for number, done in enumerate(completions)
        ]
        firsts = completions[:: renderer.n]  # a prompt counts once
        record.count(
            prompt_tokens=sum(done.prompt_tokens for done in firsts),
            hit_tokens=sum(done.hit_tokens for done in firsts),
            drawn_tokens=sum(len(done.token_ids) for done in completions),
        )
        if record.first_token_s is None:
            return  # cancelled before its first token: nobody is there
        body = renderer.end(completions)
        self._is_whole = True
        if pulse is not None:
            pulse.cancel()
        if renderer.streams:
            await _send_part(send, body, more=False)
            return
        await send(_head_of(body))
        await _send_part(send, body, more=False)

    async def _start(self, send: Send) -> None:
        if not self._renderer.streams:
            return
        async with self._starting:
            if self._has_started:
                return
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._has_started = True

    async def _show_life(self, send: Send, send_part: Send, path: str) -> None:
        """Sends a sign of life whenever nothing else was sent for a while."""
        sign = _PING if path.startswith("/v1/messages") else _COMMENT
        clock = asyncio.get_running_loop().time
        while True:
            left = self._sent_s + self._pulse_s - clock()
            if left > 0:
                await asyncio.sleep(left)
                continue
            await self._start(send)
            self._sent_s = clock()
            await _send_part(send_part, sign)

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


def _head_of(body: bytes) -> Message:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
