"""What stands in for an array: its own form of storage, with the axes of what it stands for."""

from __future__ import annotations


class Shaped:
    """Has axes, by its `shape`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Axes of `shape`."""
        return len(self.shape)
