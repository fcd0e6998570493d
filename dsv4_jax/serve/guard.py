"""Guard: what every request passes, whatever it asks for."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4_jax.serve.connection import MAX_HEAD_BYTES
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.host_names import HostNames
from dsv4_jax.serve.record import Record
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serve.web_page import PAGE_PATHS, STATE_PATH

_log = logging.getLogger(__name__)

_OPEN = ("/health",)
"""Paths that cost nothing, and ask for no key."""

_QUIET = ("/health", STATE_PATH)
"""Paths of which the log has nothing to say where all is well: they are asked again and again."""


class Guard:
    """Asks for a host and a key, turns exceptions into answers, and writes a log line a request.

    An endpoint finds its `Record` in the scope, under "record", and under "send_part" what sends
    parts of a body without a detour.
    """

    def __init__(self, app: ASGIApp, *, settings: ServeSettings) -> None:
        """Around an application.

        Args:
          app: what is guarded.
          settings: of the server.
        """
        self._app = app
        self._settings = settings
        self._open = _OPEN + (PAGE_PATHS if settings.has_page else ())
        self._host_names = HostNames(settings.allowed_hosts, settings.listens_at)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise NotImplementedError(f"there is no {scope['type']} here")
        client = scope.get("client") or ("", 0)
        record = Record(scope["path"][:200], scope["method"][:20], client[0])
        scope["record"], scope["send_part"] = record, send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                ids = record.request_id.encode()
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"request-id", ids),
                    (b"x-request-id", ids),
                ]
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
                raise ApiError(431, f"headers must have at most {MAX_HEAD_BYTES} bytes")
            self._host_names.check_host(scope)
            if scope["path"] not in self._open:
                self._host_names.check_origin(scope)
                record.key = self._find_key(record, scope["headers"])
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            record.details["gone"] = True
        except Exception as error:
            await self._refuse(record, error, send_with_id)
        finally:
            if record.path not in _QUIET or record.status != 200:
                record.write()

    async def _refuse(self, record: Record, error: Exception, send: Send) -> None:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, error.detail)
        if not isinstance(error, ApiError):
            _log.error("%s failed", record.path, exc_info=error)
            error = ApiError(500, "internal error")
        elif error.status == 500:
            _log.error("%s failed", record.path, exc_info=error.__cause__ or error)
        record.details["error"] = error.message[:200]
        if record.status:
            return  # in the middle of an answer
        body = error.for_path(record.path, record.request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.status in (429, 503):
            headers.append((b"retry-after", str(self._settings.retry_after_s).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _find_key(self, record: Record, headers: Iterable[tuple[bytes, bytes]]) -> int:
        """The number of the key that a request came with; -1 where none is asked for.

        Clients send what they have, in one header or both, and proxies add theirs: one that is
        right opens. The log says which headers held another one beside it. Of several that are
        right, the first of the server's counts, whatever the order of the headers.

        All that came is compared with every key, and all of it, so that the time says nothing of
        any.

        Raises:
          ApiError: none of them is one of the keys.
        """
        if not self._digests:
            return -1
        found, wrong = [], []
        for name, given in _keys_of(headers):
            digest = hashlib.sha256(given).digest()
            matches = [hmac.compare_digest(digest, one) for one in self._digests]
            if any(matches):
                found.append(matches.index(True))
            elif name not in wrong:
                wrong.append(name)
        if not found:
            raise ApiError(
                401,
                "a valid key is needed: Authorization: Bearer KEY, or x-api-key",
                code="invalid_api_key",
            )
        if wrong:
            record.details["wrong_key_in"] = wrong
        return min(found)


def _keys_of(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The keys that came, by the name of the header that each came in."""
    for name, value in headers:
        if name == b"x-api-key" and value.strip():
            yield "x-api-key", value.strip()
        elif name == b"authorization":
            scheme, _, given = value.strip().replace(b"\t", b" ").partition(b" ")
            if scheme.lower() == b"bearer" and given.strip():
                yield "authorization", given.strip()
