"""Room: bytes of requests that a server holds at a time, all together."""

from __future__ import annotations

from typing import Self

from dsv4_jax.serve.errors import ApiError

FREE_BYTES = 2**16
"""Of each request, which count for nothing: how many there are is bounded by the connections."""


class Room:
    """What large bodies and answers may take together; one event loop uses it."""

    def __init__(self, most_bytes: int) -> None:
        """Of so many bytes, all free."""
        self.most_bytes = most_bytes
        self.held_bytes = 0

    def share(self) -> Share:
        """That of one request, which is empty."""
        return Share(self)


class Share:
    """What one request takes up, until the end of a `with`."""

    def __init__(self, room: Room) -> None:
        """An empty one."""
        self._room = room
        self._num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Whether so many bytes more have room now.

        Raises:
          ApiError: they have none.
        """
        room = self._room
        more = max(0, self._num_bytes + num_bytes - FREE_BYTES) - self._counted
        if room.held_bytes + more > room.most_bytes:
            raise ApiError(
                429,
                f"{room.held_bytes} bytes of requests are held, and {room.most_bytes} may be; "
                "try again later",
                code="queue_full",
            )

    def add(self, num_bytes: int) -> None:
        """Takes up so many bytes more; errors are those of `check`."""
        self.check(num_bytes)
        before = self._counted
        self._num_bytes += num_bytes
        self._room.held_bytes += self._counted - before

    def clear(self) -> None:
        """Gives back what was taken up."""
        self._room.held_bytes -= self._counted
        self._num_bytes = 0

    @property
    def _counted(self) -> int:
        return max(0, self._num_bytes - FREE_BYTES)

    def __enter__(self) -> Self:
        """Gives it back at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Gives it back."""
        self.clear()
