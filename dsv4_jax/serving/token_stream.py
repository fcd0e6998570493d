"""TokenStream: tokens of requests as they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from dsv4_jax.serving.engine_core import EngineCore
from dsv4_jax.serving.request import Request, Token


class TokenStream(Iterator[Token]):
    """Tokens of requests, each once; `Engine.stream` makes it.

    It outlives an exception: the next token after one is the first that has not been given. Closing
    it cancels the requests that have not ended. If it is dropped instead, by whatever thread, they
    are cancelled at the beginning of the engine's next call.
    """

    def __init__(self, engine: EngineCore, requests: Sequence[Request]) -> None:
        """Gives nothing yet.

        Args:
          engine: whose requests they are.
          requests: whose tokens are given.
        """
        self._engine = engine
        self._requests = tuple(requests)

    def __next__(self) -> Token:
        """The next token; steps the engine until there is one."""
        return self._engine._next_token(self._requests)

    def close(self) -> None:
        """Cancels the requests that have not ended; there are no further tokens."""
        for request in self._requests:
            self._engine.cancel(request.request_id)
        self._requests = ()

    def __enter__(self) -> Self:
        """Closes it at the end of a `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def __del__(self) -> None:
        """Any thread may come here, and at any time: the engine cancels when it is called next."""
        for request in getattr(self, "_requests", ()):
            if request.finish_reason is None:
                self._engine._drop(request.request_id)
