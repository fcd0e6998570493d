"""Entries, index keys and candidates that a layer makes and later layers read, over sequences.

Source: deepseek_v41.md sections 6 and 7.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.compressor import pool_windows
from dsv4_jax.attention.params import SourceParams
from dsv4_jax.attention.selection import Selection, to_mask
from dsv4_jax.cache.candidates import best_blocks
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.sources import Candidates
from dsv4_jax.linear import linear
from pallas_kernels.common.norm_rope import rms_norm, rotate


class Shared(NamedTuple):
    """What layers leave for later ones; None is what none has made yet.

    Attributes:
      compressed: f32[B, E, C], entries of the last layer that made some, as attention reads them.
      keys: f32[B, E, IC], its index keys.
      selected: bool[B, T, E], what the last selection took of them.
      candidates: bool[B, T, E], those that later selections may take.
    """

    compressed: jax.Array | None = None
    keys: jax.Array | None = None
    selected: jax.Array | None = None
    candidates: jax.Array | None = None


def make_entries(
    params: SourceParams, x: jax.Array, frequencies: jax.Array, ratio: int, config: DSV4Config
) -> tuple[jax.Array, jax.Array]:
    """Every entry of whole sequences, and its index key, which comes from the same latent.

    The latent of a pair is the mean of its values, channel by channel, weighted by a softmax of
    their scores, and normed; that of one token is its value, normed. A key is made of the latent
    before that rotates.

    Args:
      params: parameters of the layer.
      x: [B, T, D].
      frequencies: f32[R / 2], of the compress table.
      ratio: tokens of an entry.
      config: the model.

    Returns:
      [B, T // ratio, C] and [B, T // ratio, IC], rotated and not yet rounded; a token without its
      second gives none.
    """
    count, eps = x.shape[1] // ratio, config.rms_norm_eps
    values = checkpoint_name(linear(x, params.wkv, dtype=jnp.float32), "comp/kv")
    if params.wgate is not None:
        scores = checkpoint_name(linear(x, params.wgate, dtype=jnp.float32), "comp/gate")

        def windows(array: jax.Array) -> jax.Array:
            whole = array[:, : count * ratio]
            return whole.reshape(x.shape[0], count, ratio, array.shape[-1])

        values = pool_windows(windows(values), windows(scores))
    latent = rms_norm(values.astype(x.dtype), params.norm, eps=eps)
    latent = checkpoint_name(latent, "comp/normed")
    observed = jax.lax.stop_gradient(latent)  # as of every indexer
    keys = rms_norm(linear(observed, params.wk), params.k_norm, eps=eps)
    starts = jnp.arange(count) * ratio
    return rotate(latent, starts, frequencies), rotate(keys, starts, frequencies)


def choose_candidates(selection: Selection, candidates: Candidates) -> jax.Array:
    """The entries that later selections may take: bool[B, T, E].

    Entries lie in blocks of a fixed grid. A query keeps the blocks whose best visible score is
    highest, of equals the first; the block of its newest entry is always one of them.
    """
    size, num_entries = candidates.block_size, selection.scores.shape[-1]
    kept = best_blocks(selection.scores, selection.visible, candidates)
    mask = to_mask(kept, -(-num_entries // size))
    whole = jnp.repeat(mask, size, axis=-1)[..., :num_entries]
    return checkpoint_name(whole, "idx/candidates")
