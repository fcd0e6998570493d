"""An engine inside a web application of your own.

    python examples/server_in_your_app.py
    curl -N 127.0.0.1:8001/complete -d '{"prompt": "A for loop"}'; echo

The engine runs in a thread of its own. Any number of requests submit prompts to it and read their
own streams. `dsv4-jax serve` is the ready-made server, with the protocols of OpenAI and Anthropic.
"""

import argparse
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import dsv4_jax as ds
from dsv4_jax.serving import AsyncEngine, AsyncStream, QueueFullError


async def complete(request: Request) -> Response:
    """Streams the text that goes on from `prompt`."""
    body = await request.json()
    shared: AsyncEngine = request.app.state.engine
    try:
        stream = shared.submit(
            body["prompt"],
            max_new_tokens=body.get("max_new_tokens", 60),
            temperature=body.get("temperature", 0.0),
        )
    except QueueFullError:
        return JSONResponse({"error": "busy, try again later"}, 429)
    except (KeyError, ValueError) as error:  # it says which setting is wrong, and why
        return JSONResponse({"error": str(error)}, 400)
    return StreamingResponse(text_of(stream), media_type="text/plain; charset=utf-8")


async def text_of(stream: AsyncStream) -> AsyncIterator[str]:
    """Texts as they are drawn. A client that leaves ends this, and that cancels the request."""
    async with stream:
        async for token in stream:
            yield token.text or ""


async def state(request: Request) -> Response:
    """What the engine holds."""
    return JSONResponse(await request.app.state.engine.state())


def build_app(checkpoint: str, **sizes: int) -> Starlette:
    """The application; the engine is there while it runs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine = ds.Engine.from_checkpoint(checkpoint, progress=False, **sizes)
        engine.warmup()  # compiles now, not in the first requests
        async with AsyncEngine(engine, max_waiting=64, queue_timeout_s=30) as shared:
            app.state.engine = shared
            yield

    routes = [Route("/complete", complete, methods=["POST"]), Route("/state", state)]
    return Starlette(routes=routes, lifespan=lifespan)


def main(argv: list[str] | None = None) -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default=str(ds.SHIPPED_CHECKPOINT))
    parser.add_argument("--port", type=int, default=8001)
    args = parser.parse_args(argv)
    app = build_app(args.checkpoint, max_requests=4, max_context_tokens=512)
    uvicorn.run(app, host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    ds.use_compilation_cache()
    ds.set_xla_flags()
    main()
