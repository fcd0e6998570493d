"""Definition of `index_topk`: scores of every visible key, and the K best entries.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunks import map_tokens
from pallas_kernels.codecs import Codec, Planes
from pallas_kernels.gather_entries.reference import gather_entries

_INVISIBLE = np.int32(np.iinfo(np.int32).min)
_NAN = np.int32(_INVISIBLE + 1)


def index_scores(queries: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """score[e] = sum_h w[h] relu(q[h] . k[e]) / sqrt(IC * IH), in f32; leading axes broadcast.

    Args:
      queries: f32[..., IH, IC], rotated and rounded as the keys are.
      weights: f32[..., IH], may be negative.
      keys: f32[..., E, IC].

    Returns:
      f32[..., E].
    """
    highest = jax.lax.Precision.HIGHEST
    num_heads, dim = queries.shape[-2:]
    products = jax.nn.relu(jnp.matmul(keys, queries.mT, precision=highest))
    scaled = weights * np.float32((num_heads * dim) ** -0.5)
    return jnp.sum(products * scaled[..., None, :], axis=-1)


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
    index = jnp.expand_dims(jnp.arange(num_entries), range(scores.ndim - 1))
    visible = jnp.expand_dims(visible, range(scores.ndim - 1 - visible.ndim))
    keys = jnp.where(index < visible[..., None], _sortable(scores), _INVISIBLE)
    best_keys, best = jax.lax.top_k(keys, k)
    ascending = jnp.sort(jnp.where(best_keys > _INVISIBLE, best, num_entries), axis=-1)
    return jnp.where(ascending < num_entries, ascending, -1).astype(jnp.int32)


def select_all(visible: jax.Array, num_entries: int) -> jax.Array:
    """i32[T] -> i32[T, E]: every visible entry at its own place, else -1."""
    everything = jnp.arange(num_entries, dtype=jnp.int32)[None]
    return jnp.where(everything < visible[:, None], everything, -1)


def index_topk(
    queries: jax.Array,
    weights: jax.Array,
    pool: Planes,
    block_table: jax.Array,
    *,
    request_ids: jax.Array,
    visible: jax.Array,
    layer: jax.Array,
    codec: Codec,
    k: int,
) -> jax.Array:
    """Scores each token against the keys of its own request and selects the k best.

    Where no query can see more than k entries, all visible ones are selected without scores.
    """
    visible = jnp.where(request_ids >= 0, visible, 0)
    num_entries = block_table.shape[1] * jax.tree.leaves(pool)[0].shape[2]
    if num_entries <= k:
        seen = select_all(visible, num_entries)
        return jnp.pad(seen, [(0, 0), (0, k - num_entries)], constant_values=-1)
    places = {
        "queries": queries,
        "weights": weights,
        "request_ids": request_ids,
        "visible": visible,
    }

    def select_some(some: dict[str, jax.Array], _: jax.Array) -> jax.Array:
        keys, _ = gather_entries(
            pool,
            block_table,
            some["request_ids"],
            select_all(some["visible"], num_entries),
            layer=layer,
            codec=codec,
            dim=queries.shape[-1],
        )
        scores = index_scores(some["queries"], some["weights"], keys)
        return select_top_k(scores, some["visible"], k)

    return map_tokens(select_some, places, elements_per_token=num_entries * queries.shape[-1])


def _sortable(scores: jax.Array) -> jax.Array:
    """f32 -> i32 that orders as the scores do; both zeros are 0 and NaN is the least."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    ordered = jnp.where(bits < 0, _INVISIBLE - bits, bits)
    return jnp.where(jnp.isnan(scores), _NAN, ordered)
