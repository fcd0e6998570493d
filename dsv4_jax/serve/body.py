"""Bodies: read within limits, and parsed into JSON that every later step can take."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from dsv4_jax.lines import without_mark
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.turns.digits import MAX_DIGITS, read_float


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
      ApiError: it is too large, too slow, or no JSON by its own account.
      ClientDisconnect: it was cut off.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "content-type must be application/json")
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body must have at most {max_bytes} bytes")
    if not length.isdecimal() or len(length) > 15 or int(length) > max_bytes:
        raise too_large
    parts, total = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                total += len(part)
                if total > max_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s") from None
    return b"".join(parts)


def parse_object(raw: bytes, name: str = "the body") -> dict[str, Any]:
    """A JSON object of finite numbers and of texts that UTF-8 can encode; errors call it so.

    Raises:
      ApiError: it is something else, or nested too deep.
    """
    try:
        value = json.loads(
            without_mark(raw).decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite_float,
            parse_int=_whole,
        )
        if b"\\u" in raw:  # half of a surrogate pair may have been escaped
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, f"{name} must be UTF-8") from None
    except UnicodeEncodeError:
        raise ApiError(400, f"{name} holds half of a surrogate pair") from None
    except RecursionError:
        raise ApiError(400, f"{name} is nested too deep") from None
    except ValueError as error:
        raise ApiError(400, f"{name} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text[:40]}... is too large a number")
    return int(text)


def _finite_float(text: str) -> float:
    value = read_float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


__all__ = ["ClientDisconnect", "parse_object", "read_body"]
