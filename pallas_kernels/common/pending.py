"""Results that a kernel leaves for the kernel that reads them to finish."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PickedSums(Shaped):
    """An array of which each row is the sum of some rows of another, before it is rounded.

    In plain JAX, of token t:

        picks = [rows[row[t, i]] for i in range(k) if 0 <= picked[t, i] < num_picked]
        return round_to(sum(picks) + rows[first_own + t], dtype)

    Attributes:
      rows: f32[R, n].
      row: i32[T, k], the rows of each sum, added in this order.
      picked: i32[T, k], what each of them is; a number outside 0 .. num_picked - 1 is nothing, and
        its row is not read.
      num_picked: how many there are to pick from; static.
      first_own: the row of `rows` that is added to the first sum after these; the second sum's
        follows it, and so on; static.
      dtype: to which sums are rounded; static.
      lead: axes before the last, of T elements; static.
    """

    rows: jax.Array
    row: jax.Array
    picked: jax.Array
    num_picked: int = dataclasses.field(metadata={"static": True})
    first_own: int = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    lead: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., n]."""
        return *self.lead, self.rows.shape[1]

    def reshape(self, *shape: int) -> PickedSums:
        """The same sums, with other axes before the last."""
        return dataclasses.replace(self, lead=_lead_of(self.row.shape[0], shape))

    def value(self) -> jax.Array:
        """The sums, rounded once."""
        is_there = (self.picked >= 0) & (self.picked < self.num_picked)  # bool[T, k]
        picks = jnp.where(is_there[..., None], self.rows[self.row], 0)  # f32[T, k, n]
        own = self.rows[self.first_own : self.first_own + self.row.shape[0]]  # f32[T, n]
        return round_to(jnp.sum(picks, axis=1) + own, self.dtype).reshape(self.shape)


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
        return dataclasses.replace(self, lead=_lead_of(self.parts.shape[2], shape))

    def value(self) -> jax.Array:
        """The rows, rounded once."""
        rows = round_to(jnp.sum(self.parts, axis=0), self.dtype)  # [G, T, n], rounded once
        return rows.swapaxes(0, 1).reshape(*self.shape)  # [..., G * n]


def _lead_of(count: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The axes before the last of a shape, of so many elements, of which one may be -1."""
    return np.empty(count).reshape(shape[:-1]).shape


MaybeSplit = jax.Array | SplitSums
"""An array, or parts that add up to it: what a product gives to a reader that adds parts itself."""

Output = MaybeSplit | PickedSums
"""What a sublayer gives to who writes it to the residual streams, and adds up its parts."""

Pending = SplitSums | Unnormed | ByToken | ByGroup


def finish(x: jax.Array | Pending | PickedSums) -> jax.Array:
    """The array, whichever it is."""
    return x.value() if isinstance(x, Pending | PickedSums) else x
