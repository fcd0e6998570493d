"""TokenStream: tokens of requests as they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Self

from dsv4_jax.serving.requests.request import Request, Token


class TokenStream(Iterator[Token]):
    """Tokens of requests, each once; `Engine.stream` makes it.

    It outlives an exception: the next token after one is the first that has not been given. Closing
    it cancels the requests that have not ended. If it is dropped instead, by whatever thread, they
    are cancelled at the beginning of the engine's next call.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        next_token: Callable[[Sequence[Request]], Token],
        cancel: Callable[[int], object],
        drop: Callable[[int], None],
    ) -> None:
        """Gives nothing yet; the functions are methods of the engine, which lives as long as this.

        Args:
          requests: whose tokens are given.
          next_token: steps until one of them has a token that was not given, and gives that.
          cancel: ends the request of an id.
          drop: has it ended by the next call; from any thread, at any time.
        """
        self._requests = tuple(requests)
        self._next_token, self._cancel, self._drop = next_token, cancel, drop

    def __next__(self) -> Token:
        """The next token; steps the engine until there is one."""
        return self._next_token(self._requests)

    def close(self) -> None:
        """Cancels the requests that have not ended; there are no further tokens."""
        for request in self._requests:
            self._cancel(request.request_id)
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
                self._drop(request.request_id)
