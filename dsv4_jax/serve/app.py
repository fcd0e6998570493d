"""The application: endpoints over one asynchronous engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dsv4_jax.serve.answer import Answer, PlainAnswer, Renderer
from dsv4_jax.serve.bodies import Bodies
from dsv4_jax.serve.body import read_body
from dsv4_jax.serve.errors import ApiError, as_api_error
from dsv4_jax.serve.guard import Guard
from dsv4_jax.serve.intake import Intake
from dsv4_jax.serve.reading import COUNT_TOKENS, DETOKENIZE, PATHS, TOKENIZE, Asked
from dsv4_jax.serve.record import Record
from dsv4_jax.serve.room import Room, Share
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serve.threads import Threads, while_there
from dsv4_jax.serve.web_page import STATE_PATH, page_routes
from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine, AsyncStream
from dsv4_jax.serving.metrics.prometheus import MetricsCollector

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
        self._bodies = Bodies(self._intake.reader)
        self._room = Room(settings.max_held_bytes)
        self.conversations = self._intake.reader.conversations
        self._state: asyncio.Future[bytes] | None = None
        self._state_until = 0.0
        self._created = int(time.time())
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(MetricsCollector(engine.metrics))
        self._compilers = Threads(
            "forms of answers", settings.grammar_bounds.at_once, max_waiting=_MAX_FORMS
        )

    def prepare(self) -> None:
        """Gets ready for the first form and the first large body, beside what else is going on."""
        self._compilers.begin(self._intake.prepare)
        self._bodies.prepare()

    def stop(self) -> None:
        """Ends what is done for requests, which are told so; more is not begun."""
        self._intake.close()
        self._bodies.stop()
        self.engine.stop()

    def close(self) -> None:
        """Ends its threads and processes."""
        self._intake.close()
        self._bodies.close()
        self._compilers.close()

    def draw(self, path: str) -> Callable[[Request], Awaitable[Any]]:
        """`POST` to one of `PATHS`."""

        async def answer(request: Request) -> Answer:
            if self.is_draining:
                raise ApiError(503, "the server is shutting down")
            with self._room.share() as share:
                asked = await self._read(path, request, share)
            assert isinstance(asked, Asked)
            record = request.scope["record"]
            streams, renderer = await while_there(request, self._start(asked, record))
            return Answer(streams, renderer, record, pulse_s=self.settings.pulse_s)

        return answer

    async def _start(self, asked: Asked, record: Record) -> tuple[list[AsyncStream], Renderer]:
        """Submits what was asked for; what may take long is done off the event loop."""
        if asked.grammars:
            await self._compilers.run(self._intake.compile, asked)
        renderer = self._intake.reader.renderer_of(asked)
        return self._intake.submit(asked, key=record.key), renderer

    def answer(self, path: str) -> Callable[[Request], Awaitable[Any]]:
        """`POST` to a path where the answer is in the body alone."""

        async def answer(request: Request) -> PlainAnswer:
            share = self._room.share()
            try:
                told = await self._read(path, request, share)
                assert isinstance(told, bytes)
                share.clear()
                share.add(len(told))
            except BaseException:
                share.clear()
                raise
            return PlainAnswer(told, share)

        return answer

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
            "max_model_len": self._intake.reader.plan.max_context_tokens,
        }
        wanted = request.path_params.get("name")
        if wanted is None:
            ends = {"first_id": name, "last_id": name, "has_more": False}
            return JSONResponse({"object": "list", "data": [model]} | ends)
        self._intake.reader.check_model(wanted)
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

    async def _read(self, path: str, request: Request, share: Share) -> Asked | bytes:
        """What a body is read as."""
        settings = self.settings
        raw = await read_body(
            request,
            max_bytes=settings.max_body_bytes,
            timeout_s=settings.body_timeout_s,
            share=share,
        )
        return await while_there(request, self._bodies.read(path, raw, request.scope["record"]))


async def _show(request: Request, error: Exception) -> Response:
    """Passes what starlette would answer by itself, such as 404, on to the guard."""
    raise error


def build_app(engine: AsyncEngine, settings: ServeSettings) -> Starlette:
    """The application; its `state.endpoints` are the `Endpoints`."""
    endpoints = Endpoints(engine, settings)
    posts: dict[str, Callable[[Request], Awaitable[Any]]] = {
        **{path: endpoints.draw(path) for path in PATHS},
        **{path: endpoints.answer(path) for path in (COUNT_TOKENS, TOKENIZE, DETOKENIZE)},
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
