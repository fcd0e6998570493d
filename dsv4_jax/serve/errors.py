"""ApiError: what a client is told when its request cannot be served, in its protocol's form."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from dsv4_jax.serving.asynchronous.feed import EngineClosedError, QueueFullError, RequestFailedError
from dsv4_jax.serving.requests.grammar_trials import GrammarsFullError
from dsv4_jax.serving.requests.helper_processes import HelperKilledError, HelpersClosedError

_OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request that is refused.

    Attributes:
      status: of HTTP.
      message: for the client.
      param: the field that is wrong, or None.
      code: for programs, or None; clients of OpenAI's look at it.
      error_code: the same for clients of Anthropic's, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """An error with that status."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.error_code = error_code

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, in which it is this and no subclass."""
        return _remake, (self.status, self.message, self.param, self.code, self.error_code)

    def openai(self) -> dict[str, Any]:
        """OpenAI's form."""
        kind = _OPENAI.get(self.status, _OPENAI[500 if self.status >= 500 else 400])
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """Anthropic's form."""
        kind = _ANTHROPIC.get(self.status, _ANTHROPIC[500 if self.status >= 500 else 400])
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.error_code is not None:
            error["details"] = {"error_code": self.error_code}
        return {"type": "error", "error": error, "request_id": request_id}

    def for_path(self, path: str, request_id: str) -> bytes:
        """The body of an answer at that path."""
        is_anthropic = path.startswith("/v1/messages")
        return json.dumps(self.anthropic(request_id) if is_anthropic else self.openai()).encode()


def _remake(
    status: int, message: str, param: str | None, code: str | None, error_code: str | None
) -> ApiError:
    return ApiError(status, message, param=param, code=code, error_code=error_code)


class ContextLengthError(ApiError):
    """A prompt that leaves no room for an answer.

    Agents make their conversation shorter when they see it. Some know it by its code, but clients
    show no more than the message to many, which look for "prompt is too long" or for "maximum
    context length", whatever the protocol.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, param: str) -> None:
        """A prompt of so many tokens, where there can be `max_tokens` with the answer."""
        super().__init__(
            400,
            f"prompt is too long: {prompt_tokens} tokens > {max_tokens - 1} maximum. "
            f"This model's maximum context length is {max_tokens} tokens, the answer among them",
            param=param,
            code="context_length_exceeded",
        )


def refuse(param: str, rule: str, *, error_code: str | None = None) -> NoReturn:
    """Refuses a field.

    Raises:
      ApiError: always; the rule says what the field must be, or what is missing here.
    """
    raise ApiError(400, f"{param}: {rule}", param=param, error_code=error_code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an engine's error; nothing of how it came about."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError | GrammarsFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineClosedError | HelpersClosedError):
        return ApiError(503, "the server is shutting down or has failed")
    if isinstance(error, HelperKilledError):
        return ApiError(503, str(error))
    if isinstance(error, RequestFailedError):
        return ApiError(500, "the request failed; others were not affected")
    return ApiError(500, "internal error")
