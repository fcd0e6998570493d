"""Results that a kernel leaves for the kernel that reads them to finish."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.rounding import round_to
from pallas_kernels.common.shaped import Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitSums(Shaped):
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

    def reshape(self, *shape: int) -> SplitSums:
        """The same sums, of another shape."""
        parts = self.parts.reshape(self.parts.shape[0], *shape)
        return dataclasses.replace(self, parts=parts)

    def value(self) -> jax.Array:
        """The sum, rounded once."""
        return round_to(jnp.sum(self.parts, axis=0), self.dtype)


MaybeSplit = jax.Array | SplitSums
"""An array, or parts that add up to it: what a product gives to a reader that adds parts itself."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unnormed(Shaped):
    """Rows before their RMS norm.

    Attributes:
      rows: [..., n].
      weight: [n], of the norm.
      eps: floor of the norm; static.
    """

    rows: jax.Array
    weight: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return self.rows.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows, before and after the norm."""
        return self.rows.dtype

    def reshape(self, *shape: int) -> Unnormed:
        """The same rows, of another shape."""
        return dataclasses.replace(self, rows=self.rows.reshape(*shape))

    def value(self) -> jax.Array:
        """The rows, normed."""
        return rms_norm(self.rows, self.weight, eps=self.eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByToken(Shaped):
    """Rows of groups, [G, T, n], that lie token by token.

    Attributes:
      rows: [T, G, n].
    """

    rows: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[G, T, n]."""
        count, groups, width = self.rows.shape
        return groups, count, width

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows."""
        return self.rows.dtype

    def value(self) -> jax.Array:
        """[G, T, n]."""
        return self.rows.swapaxes(0, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByGroup(Shaped):
    """Rows, [T, G * n], whose columns lie group by group, as a product of groups leaves them.

    Attributes:
      parts: [S, G, T, n], f32 parts that add up to them, before they are rounded; or they, S = 1.
      dtype: of the rows; static.
      lead: axes before the last, of T elements; static.
    """

    parts: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    lead: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., G * n]."""
        return *self.lead, self.parts.shape[1] * self.parts.shape[3]

    def reshape(self, *shape: int) -> ByGroup:
        """The same rows, with other axes before the last."""
        count = self.parts.shape[2]
        lead = np.empty(count).reshape(shape[:-1]).shape
        return dataclasses.replace(self, lead=lead)

    def value(self) -> jax.Array:
        """The rows, rounded once."""
        rows = round_to(jnp.sum(self.parts, axis=0), self.dtype)
        return rows.swapaxes(0, 1).reshape(*self.shape)


Pending = SplitSums | Unnormed | ByToken | ByGroup


def finish(x: jax.Array | Pending) -> jax.Array:
    """The array, whichever it is."""
    return x.value() if isinstance(x, Pending) else x
