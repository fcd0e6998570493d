"""Prefixes that lie elsewhere than on the devices, as whoever admits requests sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.serving.requests.request import Request


class FarPrefixes(Protocol):
    """Brings prefixes back for requests that wait; no method waits for a copy."""

    def poll(self, *, is_busy: bool) -> None:
        """Gives the prefix trees what has come; where somebody runs, in portions."""

    def work(self, is_over: Callable[[], bool]) -> None:
        """The same in small portions, until it `is_over` or nobody waits for any."""

    def is_fetching(self, request: Request) -> bool:
        """Whether a request waits for its copies."""
        ...

    def begin(self, request: Request, shard: int, tokens: HashedTokens, max_tokens: int) -> bool:
        """Begins to bring a longer prefix back than the tree can resume; whether it does."""
        ...

    def make_room(
        self, shard: int, tokens: HashedTokens | None, salt: bytes, max_tokens: int
    ) -> bool:
        """Whether a request can take its blocks now, and all that gives way for them be copied."""
        ...

    def give_way(self, oldest: Request | None) -> bool:
        """Lets go what is held for the youngest who waits, if younger than `oldest`; or says no."""
        ...

    def rest(self) -> None:
        """Nobody runs now, and would be kept waiting for some milliseconds."""

    def forget(self, request: Request) -> None:
        """A request has a slot, or does not wait any more."""


class NoFarPrefixes:
    """There are none."""

    def poll(self, *, is_busy: bool) -> None:
        """Nothing comes."""

    def work(self, is_over: Callable[[], bool]) -> None:
        """Nothing is to do."""

    def is_fetching(self, request: Request) -> bool:
        """Nobody waits."""
        return False

    def begin(self, request: Request, shard: int, tokens: HashedTokens, max_tokens: int) -> bool:
        """There is nothing to bring back."""
        return False

    def make_room(
        self, shard: int, tokens: HashedTokens | None, salt: bytes, max_tokens: int
    ) -> bool:
        """Nothing is copied."""
        return True

    def give_way(self, oldest: Request | None) -> bool:
        """Nothing is held."""
        return False

    def rest(self) -> None:
        """There is nothing to do."""

    def forget(self, request: Request) -> None:
        """Nobody was known."""
