"""Sums that a kernel left in parts, for the kernel that reads them to add up."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitSums:
    """An array in f32 parts that add up to it, before it is rounded.

    Attributes:
      parts: f32[S, ...].
      dtype: to which the sum is rounded; static.
    """

    parts: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sum."""
        return self.parts.shape[1:]

    @property
    def ndim(self) -> int:
        """Of the sum."""
        return self.parts.ndim - 1

    def reshape(self, *shape: int) -> SplitSums:
        """The same sums, of another shape."""
        parts = self.parts.reshape(self.parts.shape[0], *shape)
        return dataclasses.replace(self, parts=parts)

    def value(self) -> jax.Array:
        """The sum, rounded once."""
        return jnp.sum(self.parts, axis=0).astype(self.dtype)


def add_up(x: jax.Array | SplitSums) -> jax.Array:
    """The array, whichever it is."""
    return x.value() if isinstance(x, SplitSums) else x
