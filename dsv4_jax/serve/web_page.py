"""The page at `/`: files of the package, which show what `GET /v1/engine/state` says."""

from __future__ import annotations

import importlib.resources
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATE_PATH = "/v1/engine/state"

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.svg": ("page.svg", "image/svg+xml"),
}
PAGE_PATHS = tuple(_FILES)

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """What serves the files of the page."""
    folder = importlib.resources.files("dsv4_jax.serve") / "page"
    return [
        Route(path, _serve((folder / name).read_bytes(), kind), methods=["GET"])
        for path, (name, kind) in _FILES.items()
    ]


def _serve(contents: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return Response(contents, headers=_HEADERS, media_type=kind)

    return serve
