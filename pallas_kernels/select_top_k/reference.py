"""Definition of `select_top_k`.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_INVISIBLE = np.int32(np.iinfo(np.int32).min)
_NAN = np.int32(_INVISIBLE + 1)


def select_top_k(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
    """The k best entries that each query may see, ascending by index, then -1.

    By score, the lower index first among equals; +0 and -0 are equal, minus infinity is a score,
    and NaN ranks below it.

    Args:
      scores: f32[..., E].
      visible: i32[...]; a query sees entries 0 .. visible - 1.
      k: number selected, at most E.

    Returns:
      i32[..., k].
    """
    num_entries = scores.shape[-1]
    index = jnp.expand_dims(jnp.arange(num_entries), range(scores.ndim - 1))  # i32[..., E]
    visible = jnp.expand_dims(visible, range(scores.ndim - 1 - visible.ndim))
    keys = jnp.where(index < visible[..., None], _sortable(scores), _INVISIBLE)  # i32[..., E]
    best_keys, best = jax.lax.top_k(keys, k)  # i32[..., k] each
    # Places without an entry get number E, which sorts behind all: i32[..., k].
    ascending = jnp.sort(jnp.where(best_keys > _INVISIBLE, best, num_entries), axis=-1)
    return jnp.where(ascending < num_entries, ascending, -1).astype(jnp.int32)


def select_all(visible: jax.Array, num_entries: int) -> jax.Array:
    """i32[T] -> i32[T, E]: every visible entry at its own place, else -1."""
    everything = jnp.arange(num_entries, dtype=jnp.int32)[None]
    return jnp.where(everything < visible[:, None], everything, -1)


def _sortable(scores: jax.Array) -> jax.Array:
    """f32 -> i32 that orders as the scores do; both zeros are 0 and NaN is the least."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)  # i32[..., E]
    # Bits of negative floats ascend as the floats descend: they are mirrored, and -0 becomes 0.
    ordered = jnp.where(bits < 0, _INVISIBLE - bits, bits)
    return jnp.where(jnp.isnan(scores), _NAN, ordered)
