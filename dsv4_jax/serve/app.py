"""The application: endpoints over one asynchronous engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer

from dsv4_jax.serve.answer import Answer, Renderer
from dsv4_jax.serve.body import parse_object, read_body
from dsv4_jax.serve.dialects import MESSAGES, check_dialect
from dsv4_jax.serve.errors import ApiError, as_api_error, refuse
from dsv4_jax.serve.fields import Rule, check_fields, read_flag
from dsv4_jax.serve.fields_openai import DETOKENIZE, TOKENIZE
from dsv4_jax.serve.guard import Guard
from dsv4_jax.serve.intake import PATHS, Asked, Intake
from dsv4_jax.serve.record import Record
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serve.threads import Threads, while_there
from dsv4_jax.serve.web_page import STATE_PATH, page_routes
from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine, AsyncStream
from dsv4_jax.serving.metrics.prometheus import MetricsCollector
from dsv4_jax.serving.requests.text import encode_text

_LONG_BODY = 2**12
"""Bytes; a text of more takes milliseconds to be tokenised."""

_FORMS = frozenset({"tools", "response_format", "text", "output_config"})
"""Fields that may give the answer a form, which is read for milliseconds and more."""

_NUM_READERS = 4
_MAX_FORMS = 64
"""Requests whose forms wait to be compiled."""

_STATE_S = 0.1
"""Seconds for which a state of the engine is shown, however many look at it."""


class Endpoints:
    """What answers at each path.

    Attributes:
      engine: what serves the requests.
      settings: of the server.
      conversations: what renders and parses them.
      is_draining: new requests are refused.
    """

    def __init__(self, engine: AsyncEngine, settings: ServeSettings) -> None:
        """Endpoints of one engine."""
        self.engine = engine
        self.settings = settings
        self.is_draining = False
        self._intake = Intake(engine, settings)
        self._tokenizer = self._intake.tokenizer
        self.conversations = self._intake.conversations
        self._state: asyncio.Future[bytes] | None = None
        self._state_until = 0.0
        self._created = int(time.time())
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(MetricsCollector(engine.metrics))
        self._readers = Threads("bodies", _NUM_READERS)
        self._compilers = Threads(
            "forms of answers", settings.grammar_bounds.at_once, max_waiting=_MAX_FORMS
        )

    def prepare(self) -> None:
        """Gets ready for the first form of an answer, beside what else is going on."""
        self._compilers.begin(self._intake.prepare)

    def stop(self) -> None:
        """Ends what is done for requests, which are told so; more is not begun."""
        self._intake.close()
        self.engine.stop()

    def close(self) -> None:
        """Ends its threads and processes."""
        self._intake.close()
        self._readers.close()
        self._compilers.close()

    def draw(self, path: str) -> Callable[[Request], Awaitable[Any]]:
        """`POST` to one of `PATHS`."""

        async def answer(request: Request) -> Answer:
            if self.is_draining:
                raise ApiError(503, "the server is shutting down")
            raw, record = await self._read(request), request.scope["record"]
            streams, renderer = await while_there(request, self._start(path, raw, record))
            return Answer(streams, renderer, record, pulse_s=self.settings.pulse_s)

        return answer

    async def _start(
        self, path: str, raw: bytes, record: Record
    ) -> tuple[list[AsyncStream], Renderer]:
        """Submits what a body asks for; what may take long is done off the event loop."""

        def read(body: dict[str, Any] | None = None) -> Asked:
            body = self._parse(raw, record) if body is None else body
            with _noting(record) as left_out:
                return self._intake.read(path, body, left_out)

        if len(raw) > _LONG_BODY:
            asked = await self._readers.run(read)
        else:
            body = self._parse(raw, record)
            has_form = not _FORMS.isdisjoint(body)
            asked = await self._readers.run(read, body) if has_form else read(body)
        if asked.grammars:
            await self._compilers.run(self._intake.compile, asked)
        return self._intake.submit(asked, key=record.key), asked.renderer

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""

        def count(raw: bytes, record: Record) -> Response:
            body = {"max_tokens": 1} | self._parse(raw, record)
            self._intake.check_model(body.get("model"))
            most = self.settings.max_tools
            with _noting(record) as left_out:
                given = check_dialect(body, MESSAGES, max_tools=most, left_out=left_out)
            converted, _ = self.conversations.convert(given, MESSAGES)
            return JSONResponse({"input_tokens": len(self.conversations.encode(converted))})

        return await self._read_and(request, count)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: a text's token ids."""

        def encode(raw: bytes, record: Record) -> Response:
            body = self._parse(raw, record, TOKENIZE)
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                refuse("prompt", "must be a text")
            has_special = read_flag({"add_special_tokens": True} | body, "add_special_tokens")
            tokenizer = self._need_tokenizer()
            try:
                ids = encode_text(tokenizer, prompt, add_special_tokens=has_special).ids
            except ValueError as error:
                refuse("prompt", f"must be another text: {error}")
            limit = self._intake.max_context_tokens
            told = json.dumps({"count": len(ids), "max_model_len": limit})
            return Response(
                f'{{"tokens": [{_in_parts(ids)}], {told[1:]}', media_type="application/json"
            )

        return await self._read_and(request, encode)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of token ids."""

        def decode(raw: bytes, record: Record) -> Response:
            tokens = self._parse(raw, record, DETOKENIZE).get("tokens")
            size = self.engine.engine.config.vocab_size
            if not isinstance(tokens, list) or not all(
                type(token) is int and 0 <= token < size for token in tokens
            ):
                refuse("tokens", f"must be a list of token ids from 0 to {size - 1}")
            (text,) = self._need_tokenizer().decode_batch([tokens], skip_special_tokens=False)
            return JSONResponse({"prompt": text})

        return await self._read_and(request, decode)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models` and `/v1/models/NAME`, in OpenAI's and Anthropic's fields at once."""
        name = self.settings.model_name
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        model = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "dsv4-jax",
            "type": "model",
            "display_name": name,
            "created_at": stamp,
            "max_model_len": self._intake.max_context_tokens,
        }
        wanted = request.path_params.get("name")
        if wanted is None:
            ends = {"first_id": name, "last_id": name, "has_more": False}
            return JSONResponse({"object": "list", "data": [model]} | ends)
        self._intake.check_model(wanted)
        return JSONResponse(model)

    async def health(self, request: Request) -> Response:
        """`GET /health`: whether requests are taken."""
        is_well = self.engine.is_serving and not self.is_draining
        return JSONResponse({"status": "ok" if is_well else "ending"}, 200 if is_well else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        text = prometheus_client.generate_latest(self._registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def state(self, request: Request) -> Response:
        """`GET /v1/engine/state`: what the engine holds; who asks at once is told at once."""
        now = time.monotonic()
        if self._state is None or now > self._state_until:
            self._state_until = now + _STATE_S
            self._state = asyncio.ensure_future(self._read_state())
        return Response(await asyncio.shield(self._state), media_type="application/json")

    async def _read_state(self) -> bytes:
        try:
            state = await self.engine.state()
        except Exception as error:
            raise as_api_error(error) from error
        ours = {
            "model": self.settings.model_name,
            "takes_conversations": self.conversations.obstacle is None,
        }
        return json.dumps(ours | state, separators=(",", ":")).encode()

    async def _read_and[R](self, request: Request, call: Callable[[bytes, Record], R]) -> R:
        """What a call makes of a body; a long one in a thread, so that the event loop goes on."""
        raw, record = await self._read(request), request.scope["record"]
        if len(raw) <= _LONG_BODY:
            return call(raw, record)
        return await self._readers.run(call, raw, record)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ApiError(400, "the checkpoint has no tokenizer")
        return self._tokenizer

    async def _read(self, request: Request) -> bytes:
        return await read_body(
            request,
            max_bytes=self.settings.max_body_bytes,
            timeout_s=self.settings.body_timeout_s,
        )

    def _parse(
        self, raw: bytes, record: Record, rules: Mapping[str, Rule] | None = None
    ) -> dict[str, Any]:
        """A body; with rules, one that was checked against them and names this model or none."""
        body = parse_object(raw)
        if self.settings.log_prompts:
            record.details["body"] = body
        if rules is None:
            return body
        given = check_fields(body, rules)
        self._intake.check_model(given.get("model", self.settings.model_name))
        return given


def _in_parts(ids: list[int]) -> str:
    """Ids as JSON, with commas between; of all at once other threads would have to wait."""
    size = 2**12
    return ", ".join(json.dumps(part)[1:-1] for part in itertools.batched(ids, size))


@contextlib.contextmanager
def _noting(record: Record) -> Iterator[list[str]]:
    """A list of what a model is asked without, which the log is told, also of what is refused."""
    left_out: list[str] = []
    try:
        yield left_out
    finally:
        if left_out:
            record.details["left_out"] = left_out


async def _show(request: Request, error: Exception) -> Response:
    """Passes what starlette would answer by itself, such as 404, on to the guard."""
    raise error


def build_app(engine: AsyncEngine, settings: ServeSettings) -> Starlette:
    """The application; its `state.endpoints` are the `Endpoints`."""
    endpoints = Endpoints(engine, settings)
    posts: dict[str, Callable[[Request], Awaitable[Any]]] = {
        **{path: endpoints.draw(path) for path in PATHS},
        "/v1/messages/count_tokens": endpoints.count_tokens,
        "/tokenize": endpoints.tokenize,
        "/detokenize": endpoints.detokenize,
    }
    gets: dict[str, Callable[[Request], Awaitable[Any]]] = {
        "/v1/models": endpoints.models,
        "/v1/models/{name:path}": endpoints.models,
        "/health": endpoints.health,
        "/metrics": endpoints.metrics,
    }
    if settings.has_page:
        gets[STATE_PATH] = endpoints.state
    app = Starlette(
        routes=[
            *(page_routes() if settings.has_page else ()),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        ],
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={HTTPException: _show, ApiError: _show},
    )
    app.router.redirect_slashes = False  # redirects are made of the host that a request names
    app.state.endpoints = endpoints
    return app
