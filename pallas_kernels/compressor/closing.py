"""Which tokens of a call close a window, found with jnp before a flush is launched."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.call import CallIndices


def find_closing(call: CallIndices, compression_ratio: int) -> jax.Array:
    """The tokens of a call that close a window of `compression_ratio` tokens.

    `CallIndices.closing_tokens` compacts them. Where every token has a place in its result anyway,
    as in a decode step, each stays in its own place instead and nothing is compacted.

    Returns:
      i32[n], indices in T, and -1 for no token; n is at most T.
    """
    num_tokens = call.positions.shape[0]
    if num_tokens > num_tokens // compression_ratio + call.row_slots.shape[0]:
        return call.closing_tokens(compression_ratio)
    closes = (call.segment_ids >= 0) & ((call.positions + 1) % compression_ratio == 0)
    return jnp.where(closes, jnp.arange(num_tokens, dtype=jnp.int32), -1)
