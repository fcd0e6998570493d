"""RawRows: rows as what came before a product left them, for who rounds them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.pending import ByGroup, ByToken, Pending, SplitSums, Unnormed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RawRows:
    """Rows that are rounded by who multiplies them, or by a launch before.

    Attributes:
      values: [1, N, n], or f32[S, N, n], S sums that add up to rows.
      token: i32[R], the row of `values` that each row is; None is its own.
      norm: [in], weight of the RMS norm that comes before the rounding; None is none.
      eps: floor of the norm; static.
      interleaved: G, where rows are numbered weight by weight of a stack of G, and lie token by
        token; static.
      column_runs: G, where a row's columns lie in G runs, as a product with a stack of G leaves
        them: a row of `values` is a run, the first ones of all rows before the second; static.
      dtype: to which sums are rounded, or None of values that are no sums; static.
    """

    values: jax.Array
    token: jax.Array | None = None
    norm: jax.Array | None = None
    eps: float = dataclasses.field(default=0.0, metadata={"static": True})
    interleaved: int = dataclasses.field(default=1, metadata={"static": True})
    column_runs: int = dataclasses.field(default=1, metadata={"static": True})
    dtype: jnp.dtype | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, x: jax.Array | Pending) -> RawRows:
        """[..., in]; [G, T, in] for a stack of G weights, weight by weight."""
        match x:
            case SplitSums(parts, dtype):
                return cls(parts.reshape(parts.shape[0], -1, parts.shape[-1]), dtype=dtype)
            case Unnormed(rows, weight, eps):
                return cls(rows.reshape(1, -1, rows.shape[-1]), norm=weight, eps=eps)
            case ByToken(rows):
                return cls(rows.reshape(1, -1, rows.shape[-1]), interleaved=rows.shape[1])
            case ByGroup(parts, dtype):
                splits, runs, count, width = parts.shape
                dtype = dtype if splits > 1 else None
                if count == 1:
                    return cls(parts.reshape(splits, 1, runs * width), dtype=dtype)
                values = parts.reshape(splits, runs * count, width)
                return cls(values, column_runs=runs, dtype=dtype)
        return cls(x.reshape(1, -1, x.shape[-1]))

    @property
    def num_rows(self) -> int:
        """R."""
        if self.token is not None:
            return self.token.shape[0]
        return self.values.shape[1] // self.column_runs

    @property
    def num_inputs(self) -> int:
        """Columns of a row."""
        return self.values.shape[2] * self.column_runs
