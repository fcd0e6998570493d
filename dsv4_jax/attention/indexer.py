"""The query side of entry selection.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.params import IndexerParams
from dsv4_jax.attention.projections import linear
from dsv4_jax.config import DSV4Config
from pallas_kernels.formats import CacheFormat
from pallas_kernels.rotary import rotate


def index_queries(
    params: IndexerParams,
    x: jax.Array,
    latent: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    config: DSV4Config,
    fmt: CacheFormat,
) -> tuple[jax.Array, jax.Array]:
    """Index queries and the weight of each index head.

    Args:
      params: of the indexer.
      x: [..., D].
      latent: [..., ql], the attention's query latent.
      positions: i32[...].
      frequencies: f32[R / 2], of the compress table.
      config: the model.
      fmt: its keys are rotated and rounded, or not; so are the queries.

    Returns:
      f32[..., IH, IC] and f32[..., IH]; weights are not scaled, `index_scores` does that.
    """
    heads = linear(latent, params.wq_b)
    heads = heads.reshape(*x.shape[:-1], config.indexer_num_heads, config.indexer_head_dim)
    heads = checkpoint_name(rotate(heads, positions[..., None], frequencies), "idx/q")
    weights = checkpoint_name(linear(x, params.weights_proj, dtype=jnp.float32), "idx/weights")
    return fmt.round_index(heads), weights
