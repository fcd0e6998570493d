"""CallIndices: where the tokens of one call belong, as one value that ops take whole."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CallIndices:
    """Where the tokens of one call belong; every layer shares it.

    A call holds T tokens in B segments. The tokens of a segment belong to one request and lie next
    to each other, in order.

    Attributes:
      segment_ids: i32[T], segment of each token, its row in `block_table`; -1 for padding and for
        tokens beyond the context.
      slots: i32[T], slot of each token's request; -1 likewise.
      positions: i32[T], position of each token in its request; 0 for padding.
      lengths: i32[T], tokens that each token's request had before the call.
      row_slots: i32[B], slot of each segment; -1 where it is idle. No slot twice.
      row_lengths: i32[B], tokens of each segment's request before the call.
      row_counts: i32[B], tokens of each segment in the call.
      row_offsets: i32[B], index in T of each segment's first token.
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      visible: i32[T], entries that each token may see in one layer; None where no layer is meant.
      max_row_tokens: the most tokens that a segment can have; static.
    """

    segment_ids: jax.Array
    slots: jax.Array
    positions: jax.Array
    lengths: jax.Array
    row_slots: jax.Array
    row_lengths: jax.Array
    row_counts: jax.Array
    row_offsets: jax.Array
    block_table: jax.Array
    visible: jax.Array | None = None
    max_row_tokens: int = dataclasses.field(metadata={"static": True})

    @functools.partial(jax.jit, static_argnames="compression_ratio", inline=True)
    def closing_tokens(self, compression_ratio: int) -> jax.Array:
        """Tokens that close a window of M = `compression_ratio` tokens.

        Returns:
          i32[n], indices in T, then -1; n = min(T, T // M + B) is enough for any mix of
          segments.
        """
        num_tokens, num_rows = self.positions.shape[0], self.row_slots.shape[0]
        closes = (self.segment_ids >= 0) & ((self.positions + 1) % compression_ratio == 0)
        size = min(num_tokens, num_tokens // compression_ratio + num_rows)
        return jnp.nonzero(closes, size=size, fill_value=-1)[0].astype(jnp.int32)

    @functools.partial(jax.jit, inline=True)
    def keep(self, num_tokens: jax.Array) -> CallIndices:
        """The same call, cut to the first i32[B] tokens of each segment; the rest is padding."""
        row = jnp.maximum(self.segment_ids, 0)
        kept = (self.segment_ids >= 0) & (self.positions - self.lengths < num_tokens[row])
        return dataclasses.replace(
            self,
            segment_ids=jnp.where(kept, self.segment_ids, -1),
            slots=jnp.where(kept, self.slots, -1),
            row_counts=jnp.clip(num_tokens, 0, self.row_counts),
        )
